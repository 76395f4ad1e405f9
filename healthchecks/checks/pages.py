"""Retired memory pages: how many, why, and whether one still waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import HARD, SOFT, Context
from healthchecks.policy import DBE_GROWTH_DAYS, DBE_PAGES_GROWTH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.facts import GpuFacts, RetiredFacts
    from healthchecks.result import CheckResult

_REBOOT = "stop every client and reset the GPU, or reboot, so that the page is set aside"


def check(context: Context) -> Iterator[CheckResult]:
    """Judge the pending flag by its cause, and the count."""
    for gpu in context.gpus:
        yield _pending(context, gpu)
        yield _total(context, gpu)
        yield from _growth(context, gpu)


def _pending(context: Context, gpu: GpuFacts) -> CheckResult:
    wanted = "no page waits for retirement"
    if gpu.retired.pending is None:
        return context.on_gpu("mem.pending", gpu).missing("retired.pending", wanted, required=True)
    if not gpu.retired.pending:
        return context.on_gpu("mem.pending", gpu).passes("no", wanted)
    if _caused_by_dbe(gpu.retired):
        return context.on_gpu("mem.pending", gpu).fails(
            "pending, double-bit error",
            wanted,
            "a page with an uncorrected error is still in use until the GPU is attached anew",
            remedy=_REBOOT,
            scope="reset_gpu",
            fixed=True,
        )
    return context.on_gpu("mem.pending", gpu, SOFT).fails(
        "pending, single-bit errors",
        wanted,
        "a page with repeated corrected errors is still in use; its data is right",
        remedy=f"at the next pause: {_REBOOT}",
        scope="reload_driver",
    )


def _caused_by_dbe(retired: RetiredFacts) -> bool:
    """Ask the flags by cause; without them any page retired for a double-bit error decides."""
    if retired.pending_dbe is not None and (retired.pending_dbe or retired.pending_sbe):
        return retired.pending_dbe
    if retired.dbe is None and retired.sbe is None:
        return True  # nothing is known of the cause, so the worse one counts
    return bool(retired.dbe)


def _total(context: Context, gpu: GpuFacts) -> CheckResult:
    policy, retired = context.policy, gpu.retired
    wanted = f"below {policy.retired_pages_warn}, refused at {policy.retired_pages_fail}"
    if retired.sbe is None and retired.dbe is None:
        return context.on_gpu("mem.retired_total", gpu).missing("retired.sbe", wanted)
    total = (retired.sbe or 0) + (retired.dbe or 0)
    if total < policy.retired_pages_warn:
        return context.on_gpu("mem.retired_total", gpu).passes(f"{total} pages", wanted)
    severity = HARD if total >= policy.retired_pages_fail else SOFT
    return context.on_gpu("mem.retired_total", gpu, severity).fails(
        f"{total} pages",
        wanted,
        f"{total} retired pages ({retired.sbe or 0} corrected, {retired.dbe or 0} uncorrected);"
        " the table holds 64",
        remedy="replace the card",
        scope="hardware_service",
        value=total,
    )


def _growth(context: Context, gpu: GpuFacts) -> Iterator[CheckResult]:
    """More pages than at the last run; many of them for double-bit errors within a week refuse."""
    known, retired = context.remembered(gpu), gpu.retired
    if known is None or retired.dbe is None or retired.sbe is None or known.retired_dbe is None:
        return
    before, now = known.retired_dbe + (known.retired_sbe or 0), retired.dbe + retired.sbe
    week = [count for at, count in known.dbe_history if context.days_since(at) <= DBE_GROWTH_DAYS]
    fresh = retired.dbe - min([*week, known.retired_dbe])
    hard = retired.dbe > DBE_PAGES_GROWTH and fresh > 1
    subject = context.on_gpu("mem.retired_growth", gpu, HARD if hard else SOFT, "state")
    wanted = "no new retired page"
    if hard or now > before:
        span = f"{fresh} for uncorrected errors within a week" if hard else "since the last run"
        yield subject.fails(
            f"{before} -> {now}",
            wanted,
            f"retired pages went from {before} to {now}, {span}",
            remedy="replace the card" if hard else "watch it; replace the card when it goes on",
            scope="hardware_service",
            value=now,
        )
    else:
        yield subject.passes(f"{now} pages", wanted)
