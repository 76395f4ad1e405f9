"""From a configuration file to a served plan; imported once the stop signals are taken."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.commands._planning import DEFAULT_CONFIG, check_template, checkpoint_of, machine
from appliance.config.load import LoadedConfig, load_config
from appliance.errors import ApplianceError, ExitCode
from appliance.plan.planner import make_plan
from appliance.serve.run import hold_back, serve
from appliance.serve.state import StateDirectory

if TYPE_CHECKING:
    from appliance.serve.signals import StopSignals


def serve_config(config: Path | None, stop: StopSignals, *, published: bool) -> int:
    """Plan and serve; 0 after a stop signal.

    Args:
        config: The configuration file, None for the default one.
        stop: The stop signals of this process.
        published: The container's engine publishes the ports, so listen on every address inside.

    Raises:
        ApplianceError: With the exit code of whatever refused or ended the run.
    """
    loaded = load_config(config or DEFAULT_CONFIG)
    try:
        checkpoint = checkpoint_of(loaded, None)
        check_template(loaded, checkpoint)
        plan = make_plan(loaded, checkpoint, machine(loaded, None, to_serve=True))
    except ApplianceError as refusal:
        if _held_back(loaded, refusal, stop):
            return int(ExitCode.OK)
        raise
    server = replace(plan.server, published=published)
    return serve(replace(plan, server=server), stop)


def _held_back(loaded: LoadedConfig, refusal: ApplianceError, stop: StopSignals) -> bool:
    """Keep a repeated refusal quiet for a minute; True if a stop signal came meanwhile."""
    try:
        directory = StateDirectory(Path(loaded.config.gate.state_dir))
    except ApplianceError:
        return False  # nothing remembers what was said; saying it again does no harm
    try:
        return hold_back(directory, refusal.faults[0], lambda seconds: _wait(stop, seconds))
    finally:
        directory.close()


def _wait(stop: StopSignals, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not stop.came and time.monotonic() < until:
        time.sleep(0.1)
    return stop.came
