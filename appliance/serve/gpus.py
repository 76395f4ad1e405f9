"""The plan's GPUs while the engine runs: what the background sampler means for this appliance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.errors import Fault
from healthchecks.hysteresis import Leave
from healthchecks.metrics import exposition, gauges
from healthchecks.plan import KINDS
from healthchecks.result import Status
from healthchecks.sampler import Sampler, SampleVerdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.plan.launch_plan import LaunchPlan
    from healthchecks.result import CheckResult

LATCHED = frozenset(
    {"ecc.dbe.volatile", "ecc.dbe.growth", "gpu.present", "xid.48", "xid.62", "xid.64", "xid.79"}
)
"""Checks whose failure does not heal by waiting; heat and a slow sensor do."""


@dataclass(frozen=True)
class GpuStatus:
    """What the probes and `/metrics` say of the GPUs.

    Attributes:
        ready: Whether the hardware lets requests come.
        reason: First fault or warning, empty when there is none.
        nvml_lost: The container lost its devices; only a new container cures it.
        metrics: Gauges in Prometheus' text form.
    """

    ready: bool = True
    reason: str = ""
    nvml_lost: bool = False
    metrics: str = ""


class GpuWatch:
    """The sampler of one run; a plan without GPUs has nothing to watch and is always ready."""

    def __init__(self, sampler: Sampler) -> None:
        """Take a sampler; `start` begins."""
        self._sampler = sampler
        self._rendered = 0
        self._metrics = ""

    def start(self) -> None:
        """Sample in the background."""
        self._sampler.start()

    def status(self) -> GpuStatus:
        """Return the last sample's meaning; never blocks."""
        latest = self._sampler.latest()
        if latest.samples != self._rendered:
            self._rendered = latest.samples
            self._metrics = exposition(gauges(latest.facts, latest.results))
        return GpuStatus(
            ready=latest.ready,
            reason=latest.reason,
            nvml_lost=latest.nvml_lost,
            metrics=self._metrics,
        )


def watch_gpus(
    plan: LaunchPlan,
    on_fault: Callable[[Fault], None],
    stalled_s: Callable[[], float | None],
) -> GpuWatch:
    """Return the watch of a plan's GPUs.

    Args:
        plan: The launch plan.
        on_fault: Called on the sampler's thread for every fault that does not heal by waiting.
        stalled_s: Seconds without progress while requests wait, None when none wait.
    """

    def changed(verdict: SampleVerdict) -> None:
        fault = latched_fault(verdict)
        if fault is not None:
            on_fault(fault)

    sampler = Sampler(
        plan.gate,
        plan.parallel.gpus if plan.execution.device == "cuda" else (),
        plan.run.sample_interval_s,
        kind=KINDS[plan.parallel.kind],
        leave=Leave(plan.run.leave_gpu_c, plan.run.leave_hbm_margin_c),
        stalled_s=stalled_s,
        on_change=changed,
    )
    return GpuWatch(sampler)


def latched_fault(verdict: SampleVerdict) -> Fault | None:
    """Return the fault that ends or degrades the run, None while waiting may help."""
    if verdict.ready:
        return None
    if verdict.nvml_lost:
        what, fix = "the container must keep its GPUs", "recreate the container with `appliance up`"
        return Fault("NVML_LOST", "nvml", what, "devices taken away by the host", fix)
    failed = [result for result in verdict.hard if result.status is Status.FAIL]
    return next((_fault(result) for result in failed if result.id in LATCHED), None)


def _fault(result: CheckResult) -> Fault:
    what = f"must be {result.expected}" if result.expected else result.message
    fix = (result.remedy or "run `appliance gate` for the whole report").rstrip(".")
    return Fault("GPU_FAULT", f"{result.scope} {result.id}", what, result.observed, fix)
