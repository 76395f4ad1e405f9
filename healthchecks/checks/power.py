"""Power limits against the other GPUs and the power supply, and whether the sensor answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import SOFT, Context
from healthchecks.policy import SIBLING_POWER_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.facts import GpuFacts
    from healthchecks.result import CheckResult


def check(context: Context) -> Iterator[CheckResult]:
    """Judge limit and sensor of every GPU of the plan, and what the limits sum up to."""
    yield from _budget(context)
    for gpu in context.gpus:
        yield _limit(context, gpu)
        yield from _sensor(context, gpu)


def _budget(context: Context) -> Iterator[CheckResult]:
    """Judge the sum, where the power supply's share for the GPUs is known."""
    budget = context.policy.psu_budget_w
    if budget is None:
        return
    subject = context.on_host("power.budget")
    wanted = f"at most {budget:g} W in all"
    limits = [gpu.power.limit_w for gpu in context.gpus]
    known = [limit for limit in limits if limit is not None]
    total = sum(known)
    terms = " + ".join(f"{limit:g}" for limit in known)
    if total > budget:
        yield subject.fails(
            f"{total:g} W",
            wanted,
            f"the GPUs may draw {terms} = {total:g} W, the power supply gives them {budget:g} W",
            remedy=f"nvidia-smi -pl {budget / max(1, len(limits)):.0f} as root, or a larger supply "
            "and gate.psu_budget_w",
            value=total,
        )
    elif len(known) < len(limits):
        yield subject.missing("power.limit_w", wanted)
    else:
        yield subject.passes(f"{total:g} W", wanted)


def _limit(context: Context, gpu: GpuFacts) -> CheckResult:
    subject = context.on_gpu("power.limit", gpu, SOFT)
    limit = gpu.power.limit_w
    if limit is None:
        return subject.missing("power.limit_w", "a limit like that of its siblings")
    siblings = [other.power.limit_w for other in context.facts.gpus if other is not gpu]
    highest = max(filter(None, siblings), default=limit)
    least = SIBLING_POWER_SHARE * highest
    wanted = f"at least {least:.0f} W, {SIBLING_POWER_SHARE:.0%} of {highest:.0f} W"
    if limit >= least:
        return subject.passes(f"{limit:.0f} W", wanted)
    return subject.fails(
        f"{limit:.0f} W",
        wanted,
        f"limited to {limit:.0f} W where {highest:.0f} W are usual; the slowest GPU sets the pace",
        remedy=f"nvidia-smi -i {gpu.index} -pl {highest:.0f} as root; check the power cables",
        value=least - limit,
    )


def _sensor(context: Context, gpu: GpuFacts) -> Iterator[CheckResult]:
    subject = context.on_gpu("power.read", gpu, SOFT)
    wanted = "a value within 3 tries"
    if gpu.power.failed_reads and gpu.power.draw_w is None:
        status = gpu.read_status.get("power.draw_w", "error")
        yield subject.fails(
            status,
            wanted,
            f"the power sensor gives no value ({status})",
            remedy="watch it; a sensor that stays silent announces a failing card",
        )
    elif gpu.power.draw_w is not None:
        yield subject.passes(f"{gpu.power.draw_w:.0f} W", wanted)
