"""Judges the hardware for a launch plan."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.gate.defaults import plain_section
from appliance.plan.adjustments import Adjustments
from healthchecks.collect import Depth
from healthchecks.context import Context, Evidence
from healthchecks.facts import HostFacts
from healthchecks.judge import judge
from healthchecks.plan import GatePlan, plan_of
from healthchecks.policy import PolicyError, policy_of
from healthchecks.runner import Options, run
from healthchecks.sample import SampleError
from healthchecks.simulate import load_state, plan_as

if TYPE_CHECKING:
    from appliance.config.gate import GateSection
    from appliance.plan.launch_plan import LaunchPlan
    from healthchecks.nvml import NvmlUnavailable
    from healthchecks.report import Report
    from healthchecks.result import CheckResult

WAIT_FREE_S = 60.0
"""How long a start waits for the memory of a program that is ending."""

KERNEL_LIBRARY = Path(__file__).resolve().parents[1] / "lib" / "libnvfp4_sm70.so"
"""The kernels that will serve; their self-test runs on every GPU of the plan."""

ENGINE_DRIVER_MIN = (525, 60, 13)
"""Oldest driver that the CUDA 12.6 build of torch accepts (CUDA 12 minor-version compatibility)."""


@dataclass(frozen=True)
class GateReport:
    """The gate's answer for one plan.

    Attributes:
        report: Everything that was seen and judged.
        adjustments: What the launch must add because of it.
    """

    report: Report
    adjustments: Adjustments

    @property
    def verdict(self) -> str:
        """`pass`, `warn`, `fail` or `unknown`."""
        return self.report.verdict.value

    @property
    def exit_code(self) -> ExitCode:
        """0, 11, 12, 20 or 21."""
        return ExitCode(self.report.exit_code)

    @property
    def checks(self) -> tuple[CheckResult, ...]:
        """Every judgement in the order of the checks."""
        return self.report.checks

    def to_json(self) -> str:
        """Return the report by its published schema."""
        return self.report.to_json()


def run_gate(
    plan: LaunchPlan,
    *,
    simulate: Path | None = None,
    strict: bool = False,
    keep_hold: bool = True,
    wait_free_s: float = WAIT_FREE_S,
) -> GateReport:
    """Judge the machine, or a recorded state of one; on the CPU engine nothing is measured.

    Args:
        plan: The launch plan.
        simulate: A recorded machine state, judged in place of this machine; its first GPUs stand
            for the plan's.
        strict: With `simulate`: what a published record does not show is unknown where a start
            needs it.
        keep_hold: Whether this process keeps the GPUs to itself from now on, so that a second
            appliance on the same state volume is refused.
        wait_free_s: How long to wait for memory that an ending program still holds.

    Raises:
        ApplianceError: 10 if the plan's section `gate` is not whole, 2 if the state cannot be read.
    """
    started = time.monotonic()
    gate_plan = gate_plan_of(plan)
    if simulate is not None:
        report = simulated(simulate, gate_plan, strict=strict)
    else:
        library = KERNEL_LIBRARY if KERNEL_LIBRARY.is_file() else None
        depth = Depth(wait_free_s=wait_free_s, kernel_library=library)
        report = run(gate_plan, Options(depth, keep_hold=keep_hold))
    return gate_report(replace(report, duration_ms=round((time.monotonic() - started) * 1000)))


def gate_without_plan(section: GateSection, error: NvmlUnavailable) -> GateReport:
    """Return the report of a machine whose GPUs cannot be listed, so that no plan can be made.

    Its exit code is 11 without driver or library, 21 when NVML does not answer.
    """
    plan = GatePlan(kind="single", uuids=(), policy=policy_of(plain_section(section)))
    stuck = () if error.stuck_pid is None else (error.stuck_pid,)
    facts = HostFacts(nvml=error.kind, nvml_detail=error.detail, wedged_pids=stuck)
    return gate_report(judge(Context(facts, plan)))


def gate_of_host(section: GateSection, facts: HostFacts) -> GateReport | None:
    """Return the report of a machine with a GPU that hangs or is lost, None when there is none.

    For a machine that no plan can be made for: only NVML and the presence of the GPUs are judged.
    """
    named = {gpu.index: gpu.uuid or f"index-{gpu.index}" for gpu in facts.gpus}
    gpus = tuple(replace(gpu, uuid=named[gpu.index]) for gpu in facts.gpus)
    policy = policy_of(plain_section(section))
    plan = GatePlan(kind="single", uuids=tuple(named.values()), policy=policy)
    report = judge(Context(replace(facts, gpus=gpus), plan), ("nvml", "presence"))
    return gate_report(report) if report.exit_code else None


def gate_plan_of(plan: LaunchPlan) -> GatePlan:
    """Return what the checks need of a launch plan.

    Raises:
        ApplianceError: 10 if its section `gate` is not whole.
    """
    try:
        return replace(plan_of(asdict(plan)), driver_min=ENGINE_DRIVER_MIN)
    except (PolicyError, ValueError) as error:
        where = plan.config_path
        fix = "make the plan again with `appliance plan`"
        raise ApplianceError(
            ExitCode.CONFIG, Fault("GATE_PLAN", where, "a whole section gate", str(error), fix)
        ) from error


def simulated(path: Path, plan: GatePlan, *, strict: bool) -> Report:
    """Judge a recorded state as if it were this machine.

    Raises:
        ApplianceError: 2 if the file is no recorded state.
    """
    try:
        facts, uuids, sample = load_state(path)
    except SampleError as error:
        raise ApplianceError(
            ExitCode.USAGE,
            Fault(
                "GATE_RECORD",
                str(path),
                "a recorded machine state",
                str(error),
                "give a file that `appliance gate --record` wrote",
            ),
        ) from error
    replayed = plan_as(plan.kind, uuids, plan.policy)
    if not sample:
        replayed = replace(
            replayed, utilization=plan.utilization, custom_all_reduce=plan.custom_all_reduce
        )
    evidence = Evidence.STRICT if strict else Evidence.LENIENT
    if not sample:
        evidence = Evidence.LIVE
    return judge(Context(facts, replayed, evidence))


def gate_report(report: Report) -> GateReport:
    """Return a report with its adjustments in the launch plan's own words."""
    launch = report.launch
    return GateReport(report, Adjustments(launch.env, launch.args, launch.reasons))
