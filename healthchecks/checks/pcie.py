"""The PCIe link: rate and width against what the plan needs, and its errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import HARD, SOFT, Context, Evidence
from healthchecks.policy import (
    BUSY_PERCENT,
    CORRECTED_DURING_LOAD,
    GB_S_PER_LANE,
    REPLAYS_PER_MIN_PER_LANE,
    VOLTA_GENERATION,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.facts import GpuFacts
    from healthchecks.result import CheckResult, Severity

_RESEAT = "reseat the card, use a slot of the CPU, check risers and firmware settings"


def check(context: Context) -> Iterator[CheckResult]:
    """Judge the link of every GPU of the plan."""
    for gpu in context.gpus:
        yield _rate(context, gpu)
        yield _width(context, gpu)
        yield _replay(context, gpu)
        yield from _aer(context, gpu)


def _generation(context: Context, gpu: GpuFacts) -> int:
    """Return the generation under load; an idle reading of a recorded state says nothing."""
    pcie = gpu.pcie
    if pcie.loaded_generation is not None:
        return pcie.loaded_generation
    awake = context.evidence is Evidence.LIVE or _busy(gpu)
    seen = (pcie.generation,) if awake else (pcie.generation, pcie.generation_max)
    return max(filter(None, seen), default=VOLTA_GENERATION)


def _busy(gpu: GpuFacts) -> bool:
    return (gpu.utilization_percent or 0) >= BUSY_PERCENT


def link_rate(context: Context, gpu: GpuFacts) -> float | None:
    """Return lanes times their rate in GB/s a direction, None without a width."""
    width = max(filter(None, (gpu.pcie.width, gpu.pcie.loaded_width)), default=None)
    if width is None:
        return None
    newest = GB_S_PER_LANE[max(GB_S_PER_LANE)]
    return width * GB_S_PER_LANE.get(_generation(context, gpu), newest)


def _by_nvlink(context: Context, gpu: GpuFacts) -> bool:
    return any(pair.nvlink_lanes for pair in context.pairs if gpu.index in (pair.a, pair.b))


def _limits(context: Context, gpu: GpuFacts) -> tuple[float, float]:
    """Return the rates in GB/s that refuse and that warn; 0 refuses nothing."""
    policy = context.policy
    if context.tensor and not _by_nvlink(context, gpu):
        return policy.tensor_rate_fail, policy.tensor_rate_warn
    if context.plan.kind == "pp2":
        return policy.pipeline_rate_fail, policy.rate_warn
    return 0.0, policy.rate_warn


def _rate(context: Context, gpu: GpuFacts) -> CheckResult:
    refuse, warn = _limits(context, gpu)
    rate = link_rate(context, gpu)
    wanted = f"at least {warn:g} GB/s" + (f", refused below {refuse:g}" if refuse else "")
    if rate is None:
        severity = HARD if refuse else SOFT
        subject = context.on_gpu("pcie.rate", gpu, severity)
        return subject.missing("pcie.width", wanted, required=context.parallel)
    observed = f"{rate:.1f} GB/s (x{gpu.pcie.loaded_width or gpu.pcie.width})"
    if rate >= warn:
        return context.on_gpu("pcie.rate", gpu, HARD if refuse else SOFT).passes(observed, wanted)
    severity = HARD if rate < refuse else SOFT
    return context.on_gpu("pcie.rate", gpu, severity).fails(
        observed,
        wanted,
        f"the link gives {observed} in each direction",
        remedy=f"{_RESEAT}; parallel.mode: pipeline needs less" if context.tensor else _RESEAT,
        scope="hardware_service",
        value=warn - rate,
    )


def _width(context: Context, gpu: GpuFacts) -> CheckResult:
    """Compare with a minimum and the best ever seen: NVML's maximum includes the slot."""
    severity: Severity = HARD if context.tensor else SOFT
    subject = context.on_gpu("pcie.width_degraded", gpu, severity)
    width = gpu.pcie.loaded_width or gpu.pcie.width
    known = context.remembered(gpu)
    best = max(filter(None, (gpu.pcie.width_max, known.best_width if known else None)), default=0)
    least = context.policy.min_width
    wanted = f"at least x{least}" + (f" and not below x{best}, its best" if best else "")
    if width is None:
        return subject.missing("pcie.width", wanted, required=context.parallel)
    if width >= max(best, least):
        return subject.passes(f"x{width}", wanted)
    reason = (
        f"below x{best}, what it could do" if width < best else f"below gate.pcie.min_width {least}"
    )
    return subject.fails(
        f"x{width}",
        wanted,
        f"the link runs at x{width}, {reason}",
        remedy=_RESEAT,
        scope="hardware_service",
        value=max(best, least) - width,
    )


def _replay(context: Context, gpu: GpuFacts) -> CheckResult:
    subject = context.on_gpu("pcie.replay", gpu, SOFT)
    lanes = gpu.pcie.loaded_width or gpu.pcie.width or 16
    limit = REPLAYS_PER_MIN_PER_LANE * lanes
    rate, burst = gpu.pcie.replays_per_min, gpu.pcie.replays_during_load
    wanted = f"at most {limit:.1f} replays a minute"
    if rate is not None and rate > limit:
        observed = f"{rate:.0f} replays a minute"
        return subject.fails(
            observed, wanted, observed, remedy=_RESEAT, scope="hardware_service", value=rate
        )
    if burst is not None and burst > CORRECTED_DURING_LOAD:
        observed = f"{burst} replays during the copy test"
        return subject.fails(
            observed, wanted, observed, remedy=_RESEAT, scope="hardware_service", value=burst
        )
    if rate is None and burst is None:
        return subject.skipped("one reading gives no rate")
    return subject.passes(f"{rate or burst or 0:.0f}", wanted)


def _aer(context: Context, gpu: GpuFacts) -> Iterator[CheckResult]:
    known = context.remembered(gpu)
    before = 0 if known is None or known.aer_fatal is None else known.aer_fatal
    fatal = max(0, (gpu.pcie.aer_fatal or 0) - before)
    logged = context.facts.kernel.aer_fatal
    if fatal or logged:
        observed = ", ".join(logged) or f"{fatal} uncorrected errors"
        yield context.on_gpu("pcie.aer", gpu, HARD, "kmsg" if logged else "sysfs").fails(
            observed,
            "no uncorrected PCIe error",
            f"uncorrected PCIe errors: {observed}",
            remedy=_RESEAT,
            scope="hardware_service",
            value=fatal or len(logged),
        )
        return
    corrected = gpu.pcie.aer_correctable_during_load or 0
    if corrected > CORRECTED_DURING_LOAD:
        yield context.on_gpu("pcie.aer", gpu, SOFT, "sysfs").fails(
            f"{corrected} corrected errors during the copy test",
            f"at most {CORRECTED_DURING_LOAD}",
            f"{corrected} corrected PCIe errors while data moved",
            remedy=_RESEAT,
            scope="hardware_service",
            value=corrected,
        )
    elif gpu.pcie.aer_fatal is not None:
        yield context.on_gpu("pcie.aer", gpu, HARD, "sysfs").passes(
            "0", "no uncorrected PCIe error"
        )
