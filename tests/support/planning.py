"""What the tests of planning plan with, and what a refused plan says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from appliance.checkpoint.summary import CheckpointSummary
from appliance.config.load import LoadedConfig
from appliance.errors import ApplianceError, Fault
from appliance.plan.planner import make_plan
from appliance.units import GIB
from healthchecks.facts import HostFacts

Configure = Callable[..., LoadedConfig]
Tiny = Callable[..., CheckpointSummary]
Public = Callable[[str], CheckpointSummary]
HOST = HostFacts(memory_total_bytes=24 * GIB)
"""A machine without a GPU."""


def refusal(
    loaded: LoadedConfig, summary: CheckpointSummary, host: HostFacts
) -> tuple[int, tuple[Fault, ...]]:
    """Plan what must be refused; return exit code and faults."""
    with pytest.raises(ApplianceError) as caught:
        make_plan(loaded, summary, host)
    return int(caught.value.exit_code), caught.value.faults
