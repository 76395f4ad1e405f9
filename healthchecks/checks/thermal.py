"""Temperatures, and whether hardware holds the clocks back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import HARD, SOFT, Context
from healthchecks.policy import IDLE_POWER_W

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.facts import GpuFacts
    from healthchecks.result import CheckResult

HARDWARE_REASONS = frozenset({"hw_thermal_slowdown", "hw_power_brake"})
SOFTWARE_REASONS = frozenset({"sw_thermal_slowdown", "hw_slowdown"})
_COOL = "check air flow and fans, clean the heat sink, lower the power limit (nvidia-smi -pl)"


def check(context: Context) -> Iterator[CheckResult]:
    """Judge every GPU of the plan."""
    for gpu in context.gpus:
        yield _core(context, gpu)
        yield _memory(context, gpu)
        yield _slowdown(context, gpu)
        yield from _throttle(context, gpu)
        yield from _idle(context, gpu)


def _core(context: Context, gpu: GpuFacts) -> CheckResult:
    limit, found = context.policy.gpu_warn_c, gpu.thermal.gpu_c
    subject = context.on_gpu("thermal.gpu", gpu, SOFT)
    if found is None:
        return subject.missing("thermal.gpu_c", f"below {limit} C")
    if found < limit:
        return subject.passes(f"{found} C", f"below {limit} C")
    return subject.fails(
        f"{found} C", f"below {limit} C", f"the core is at {found} C", remedy=_COOL, value=found
    )


def _memory(context: Context, gpu: GpuFacts) -> CheckResult:
    least, limit, found = context.policy.hbm_margin_warn_c, gpu.thermal.hbm_max_c, gpu.thermal.hbm_c
    subject = context.on_gpu("thermal.hbm", gpu, SOFT)
    wanted = f"more than {least} C below its limit"
    if found is None:
        return subject.missing("thermal.hbm_c", wanted)
    if limit is None:
        return subject.missing("thermal.hbm_max_c", wanted)
    if limit - found > least:
        return subject.passes(f"{found} C of {limit} C", wanted)
    return subject.fails(
        f"{found} C of {limit} C",
        wanted,
        f"the memory is at {found} C, {limit - found} C below its limit",
        remedy=_COOL,
        value=found,
    )


def _slowdown(context: Context, gpu: GpuFacts) -> CheckResult:
    limit, found, reasons = context.policy.slowdown_c, gpu.thermal.gpu_c, gpu.thermal.reasons
    subject = context.on_gpu("thermal.slowdown", gpu, HARD)
    wanted = f"below {limit} C and no hardware slowdown"
    active = sorted(HARDWARE_REASONS.intersection(reasons or ()))
    hot = found is not None and found >= limit
    if hot or active:
        observed = ", ".join([*([f"{found} C"] if found is not None else []), *active])
        return subject.fails(
            observed,
            wanted,
            f"hardware slows the GPU down ({observed})",
            remedy=_COOL,
            scope="hardware_service",
            value=found,
        )
    if found is None:
        return subject.missing("thermal.gpu_c", wanted)
    if reasons is None:
        return subject.missing("thermal.reasons", wanted)
    return subject.passes(f"{found} C", wanted)


def _throttle(context: Context, gpu: GpuFacts) -> Iterator[CheckResult]:
    """Report clocks that the driver holds back for heat; it costs speed and nothing else."""
    active = sorted(SOFTWARE_REASONS.intersection(gpu.thermal.reasons or ()))
    if active and not HARDWARE_REASONS.intersection(gpu.thermal.reasons or ()):
        clock = "" if gpu.sm_clock_mhz is None else f" at {gpu.sm_clock_mhz} MHz"
        observed = f"{', '.join(active)}{clock}"
        yield context.on_gpu("thermal.throttle", gpu, SOFT).fails(
            observed, "full clocks", f"heat holds the clocks back ({observed})", remedy=_COOL
        )


def _idle(context: Context, gpu: GpuFacts) -> Iterator[CheckResult]:
    found, draw, limit = gpu.thermal.gpu_c, gpu.power.draw_w, context.policy.idle_warn_c
    if found is None or draw is None or draw >= IDLE_POWER_W:
        return
    subject = context.on_gpu("thermal.idle", gpu, SOFT)
    observed, wanted = f"{found} C at {draw:.0f} W", f"below {limit} C when idle"
    if found >= limit:
        yield subject.fails(
            observed, wanted, f"hot while idle: {observed}", remedy=_COOL, value=found
        )
    else:
        yield subject.passes(observed, wanted)
