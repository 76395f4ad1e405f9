"""What `appliance bundle` says of the machine: facts and verdict, without touching a GPU by CUDA.

The engine may be serving: nothing is allocated, and neither state nor locks are written.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from appliance.bundle.files import read_tail
from appliance.gate.defaults import plain_section
from appliance.gate.gate import GateReport, gate_of_host, gate_plan_of, gate_report
from appliance.serve.metrics import package_version
from healthchecks import sysfs
from healthchecks.collect import Depth, collect
from healthchecks.context import Context
from healthchecks.facts import HostFacts
from healthchecks.history import refresh
from healthchecks.judge import judge, without_measuring
from healthchecks.plan import GatePlan
from healthchecks.policy import policy_of
from healthchecks.state import State
from healthchecks.state_file import STATE_NAME, StateFile, state_of

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.config.gate import GateSection
    from appliance.plan.launch_plan import LaunchPlan

_PACKAGES = ("vllm", "torch", "triton", "transformers", "pydantic", "nvidia-ml-py")


@dataclass(frozen=True)
class Machine:
    """The machine as the gate sees it, and what of a plan the gate needs."""

    facts: HostFacts
    plan: GatePlan
    planned: bool


def look(plan: LaunchPlan | None, section: GateSection | None, state_dir: Path) -> Machine:
    """Read the machine; on a host where the next look may hang, nothing is read."""
    if plan is None:
        gate_plan = GatePlan(kind="single", uuids=(), policy=policy_of(plain_section(section)))
    else:
        gate_plan = gate_plan_of(plan)
    action = StateFile(state_dir).required_action(sysfs.boot_id())
    if action is not None:
        return Machine(HostFacts(host_action=action), gate_plan, planned=plan is not None)
    return Machine(collect(gate_plan, Depth(cuda=False)), gate_plan, planned=plan is not None)


def verdict(seen: Machine, section: GateSection | None, state_dir: Path) -> GateReport:
    """Judge what was seen and what is remembered.

    Raises:
        LookupError: If there is no plan to judge for and nothing wrong with the GPUs themselves.
    """
    facts, plan = seen.facts, seen.plan
    if facts.host_action is not None:
        return gate_report(judge(Context(facts, plan), ("latches",)))
    if seen.planned and (not plan.uses_gpu or plan.policy.mode == "off"):
        return gate_report(without_measuring(plan))
    if seen.planned or facts.nvml != "ok":
        state = refresh(_remembered(state_dir), facts)
        return gate_report(judge(Context(facts, plan, state=state, now=datetime.now(UTC))))
    report = None if section is None else gate_of_host(section, facts)
    if report is None:
        raise LookupError("there is no plan to judge the machine for")
    return report


def versions(seen: Machine | None) -> dict[str, object]:
    """Return the versions of everything that may matter; packages are not imported."""
    facts = HostFacts() if seen is None else seen.facts
    return {
        "appliance": package_version(),
        "python": sys.version,
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "system": _system(),
        "driver": facts.driver_version,
        "nvml": facts.nvml_version,
        "packages": {name: _installed(name) for name in _PACKAGES},
    }


def _remembered(state_dir: Path) -> State:
    """Read the gate's state and leave it where it is, whatever it holds."""
    try:
        return state_of(json.loads(read_tail(state_dir / STATE_NAME).text))
    except FileNotFoundError:
        return State()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return replace(State(), trusted=False, note=f"{STATE_NAME}: {error}")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _system() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None
