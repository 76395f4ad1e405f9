"""How far apart the plan's GPUs sit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import INFO, SOFT, Context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.result import CheckResult


def check(context: Context) -> Iterator[CheckResult]:
    """Judge the path of every pair; the path alone says nothing about permission."""
    wanted = "a path inside one socket"
    for pair in context.pairs:
        subject = context.on_pair("pair.topology", pair, SOFT if context.tensor else INFO)
        if pair.topology is None:
            yield subject.missing("topology", wanted)
        elif pair.topology == "SYS" and not pair.nvlink_lanes:
            yield subject.fails(
                "SYS",
                wanted,
                "the path goes from one CPU socket to the other",
                remedy="put both cards below one socket",
                scope="hardware_service",
            )
        else:
            yield subject.passes(pair.topology, wanted)
