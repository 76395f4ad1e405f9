"""Plans made by hand, for the parts that only read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from plans import make_plan

from appliance.plan.adjustments import NO_ADJUSTMENTS
from appliance.plan.launch_plan import LaunchPlan
from appliance.serve.ladder import Settings

PlanMaker = Callable[..., LaunchPlan]


@pytest.fixture
def plan() -> PlanMaker:
    """Return a plan with fields of its parts replaced: `plan(model={"max_model_len": 64})`."""

    def made(**parts: dict[str, Any]) -> LaunchPlan:
        base = make_plan()
        changed = {name: replace(getattr(base, name), **fields) for name, fields in parts.items()}
        return replace(base, **changed)

    return made


@pytest.fixture
def settings(plan: PlanMaker) -> Callable[..., Settings]:
    """Return settings without adjustments of the gate."""
    return lambda **parts: Settings(plan(**parts), NO_ADJUSTMENTS)
