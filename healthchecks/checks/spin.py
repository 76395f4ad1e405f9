"""The mark of a collective that spins: every GPU busy, hardly any power, and no token comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import HARD
from healthchecks.policy import SPIN_POWER_W, SPIN_S, SPIN_UTILIZATION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.context import Context
    from healthchecks.facts import GpuFacts
    from healthchecks.result import CheckResult


def check(context: Context) -> Iterator[CheckResult]:
    """Judge a running engine; without word of its progress there is nothing to judge."""
    stalled_s = context.facts.stalled_s
    if stalled_s is None or not context.parallel or not context.gpus:
        return
    subject = context.on_host("engine.spin", HARD, "nvml")
    wanted = f"a token at least every {SPIN_S:g} s while requests wait"
    observed = f"no token for {stalled_s:.0f} s"
    if stalled_s >= SPIN_S and all(_spins(gpu) for gpu in context.gpus):
        watts = ", ".join(
            f"{gpu.power.draw_w:.0f} W" for gpu in context.gpus if gpu.power.draw_w is not None
        )
        yield subject.fails(
            f"{observed}, 100 % busy at {watts}",
            wanted,
            f"a collective between the GPUs spins: {observed}, 100 % busy at {watts}",
            remedy=(
                "start again; if it comes back, gate.p2p.policy: off and parallel.mode: pipeline"
            ),
            scope="restart_container",
            value=stalled_s,
        )
    else:
        yield subject.passes(observed, wanted)


def _spins(gpu: GpuFacts) -> bool:
    busy, draw = gpu.utilization_percent, gpu.power.draw_w
    return (
        busy is not None and busy >= SPIN_UTILIZATION and draw is not None and draw < SPIN_POWER_W
    )
