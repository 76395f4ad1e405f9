"""Whether the driver stays loaded when nobody uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import SOFT, Context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.result import CheckResult


def check(context: Context) -> Iterator[CheckResult]:
    """Judge persistence mode, without which volatile counters vanish with the last client."""
    for gpu in context.gpus:
        subject = context.on_gpu("host.persistence", gpu, SOFT)
        if gpu.persistence is None:
            yield subject.missing("persistence", "on")
        elif gpu.persistence:
            yield subject.passes("on", "on")
        else:
            yield subject.fails(
                "off",
                "on",
                "persistence is off: error counters since driver load vanish with the last client",
                remedy="run nvidia-persistenced on the host",
            )
