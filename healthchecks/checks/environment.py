"""Inherited variables that steer NCCL behind the plan's back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import SOFT, Context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.result import CheckResult

WORKAROUNDS = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE")


def check(context: Context) -> Iterator[CheckResult]:
    """Name left-over work-arounds on a pair whose NVLink works."""
    if not context.parallel:
        return
    found = {
        name: context.facts.environment[name]
        for name in WORKAROUNDS
        if name in context.facts.environment
    }
    subject = context.on_host("host.environment", SOFT, "config")
    working = any(pair.nvlink_lanes and pair.functional in ("ok", None) for pair in context.pairs)
    named = ", ".join(f"{name}={value}" for name, value in found.items())
    if found and working:
        yield subject.fails(
            named,
            "no inherited work-around",
            f"{named} is inherited and turns off transports that work here",
            remedy="remove the variables from the container's environment",
            scope="edit_config",
        )
    else:
        yield subject.passes(named or "none", "no inherited work-around")
