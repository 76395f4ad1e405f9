"""Memory errors: whether ECC is on, and what it counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import SOFT, Context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.facts import GpuFacts
    from healthchecks.result import CheckResult

_RESET = "reset the GPU (with all NVLink peers) or reboot; this is not a memory shortage"
_REPLACE = "find out why and run `appliance gate ack`; replace the card when it grows again"


def check(context: Context) -> Iterator[CheckResult]:
    """Judge mode and counters of every GPU of the plan."""
    for gpu in context.gpus:
        yield _mode(context, gpu)
        yield _volatile(context, gpu)
        yield _aggregate(context, gpu)
        yield _lifetime(context, gpu)
        yield from _rate(context, gpu)
        yield from _cleared(context, gpu)


def _mode(context: Context, gpu: GpuFacts) -> CheckResult:
    ecc, wanted = gpu.ecc, "on, now and after the next reboot"
    subject = context.on_gpu("ecc.mode", gpu)
    if not context.policy.require_ecc:
        return subject.skipped("gate.ecc.require_enabled is false")
    if ecc.mode_current is None:
        return subject.missing("ecc.mode_current", wanted)
    pending = ecc.mode_current if ecc.mode_pending is None else ecc.mode_pending
    observed = f"{_word(on=ecc.mode_current)}, after reboot {_word(on=pending)}"
    if ecc.mode_current and pending:
        return subject.passes(observed, wanted)
    return subject.fails(
        observed,
        wanted,
        f"ECC is {observed}",
        remedy="nvidia-smi -e 1 as root, then reboot; ECC costs no memory on HBM2",
        scope="reboot",
    )


def _word(*, on: bool) -> str:
    return "on" if on else "off"


def _volatile(context: Context, gpu: GpuFacts) -> CheckResult:
    subject, wanted = context.on_gpu("ecc.dbe.volatile", gpu), "0 since driver load"
    places = {place: count for place, count in gpu.ecc.volatile_dbe_at.items() if count}
    known = [
        count for count in (gpu.ecc.volatile_dbe, sum(places.values()) or None) if count is not None
    ]
    if not known:
        return subject.missing("ecc.volatile_dbe", wanted, required=True)
    count = max(known)
    if not count:
        return subject.passes("0", wanted)
    where = "".join(f", {place} {number}" for place, number in places.items())
    return subject.fails(
        f"{count}{where}",
        wanted,
        f"{count} uncorrected memory errors since the driver was loaded{where}",
        remedy=_RESET,
        scope="reset_gpu",
        value=count,
    )


def _aggregate(context: Context, gpu: GpuFacts) -> CheckResult:
    """Tell growth, which refuses until acknowledged, from history, which only warns."""
    count, known = gpu.ecc.aggregate_dbe, context.remembered(gpu)
    if count is None:
        return context.on_gpu("ecc.dbe.growth", gpu).missing("ecc.aggregate_dbe", "no growth")
    baseline = None if known is None else known.baseline_dbe
    if baseline is not None and count > baseline:
        return context.on_gpu("ecc.dbe.growth", gpu, source="state").fails(
            f"{baseline} -> {count}",
            f"at most {baseline}, the baseline",
            f"uncorrected errors over the card's life grew from {baseline} to {count}",
            remedy=_REPLACE,
            scope="hardware_service",
            value=count,
        )
    if count:
        return context.on_gpu("ecc.dbe.history", gpu, SOFT).fails(
            f"{count}",
            "0 over the card's life",
            f"{count} uncorrected errors over the card's life, not growing",
            remedy="watch it; the card is a candidate for replacement",
            value=count,
        )
    return context.on_gpu("ecc.dbe.growth", gpu).passes("0", "no growth")


def _lifetime(context: Context, gpu: GpuFacts) -> CheckResult:
    limit, count = context.policy.sbe_lifetime_warn, gpu.ecc.aggregate_sbe
    subject = context.on_gpu("ecc.sbe.lifetime", gpu, SOFT)
    if count is None:
        return subject.missing("ecc.aggregate_sbe", f"at most {limit}")
    if count > limit:
        return subject.fails(
            f"{count}",
            f"at most {limit}",
            f"{count} corrected errors over the card's life",
            remedy="plan a replacement of the card",
            scope="hardware_service",
            value=count,
        )
    return subject.passes(f"{count}", f"at most {limit}")


def _rate(context: Context, gpu: GpuFacts) -> Iterator[CheckResult]:
    known, count = context.remembered(gpu), gpu.ecc.aggregate_sbe
    days = context.days_since(None if known is None else known.last_seen)
    if known is None or known.aggregate_sbe is None or count is None or not days:
        return
    limit = context.policy.sbe_per_day_warn
    # A span below a day counts as one day: a rate over minutes would be noise.
    rate = max(0, count - known.aggregate_sbe) / max(days, 1.0)
    subject = context.on_gpu("ecc.sbe.rate", gpu, SOFT, "state")
    if rate > limit:
        yield subject.fails(
            f"{rate:.0f} a day",
            f"at most {limit} a day",
            f"{rate:.0f} corrected errors a day since the last run",
            remedy="plan a replacement of the card",
            scope="hardware_service",
            value=rate,
        )
    else:
        yield subject.passes(f"{rate:.0f} a day", f"at most {limit} a day")


def _cleared(context: Context, gpu: GpuFacts) -> Iterator[CheckResult]:
    known, count = context.remembered(gpu), gpu.ecc.aggregate_dbe
    if known is None or known.aggregate_dbe is None or count is None:
        return
    subject = context.on_gpu("ecc.counters", gpu, SOFT, "state")
    if count < known.aggregate_dbe:
        yield subject.fails(
            f"{known.aggregate_dbe} -> {count}",
            "lifetime counters never sink",
            f"someone cleared the lifetime counters ({known.aggregate_dbe} -> {count});"
            f" the peak of {known.peak_dbe} stays on record",
            remedy="ask who ran nvidia-smi -p on this card, and why",
        )
