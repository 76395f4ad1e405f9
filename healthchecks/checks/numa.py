"""Whether this process runs beside its GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import SOFT, Context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.result import CheckResult


def check(context: Context) -> Iterator[CheckResult]:
    """Judge the memory node of every GPU against the one this process is bound to."""
    bound = context.facts.numa_node
    for gpu in context.gpus:
        if gpu.numa_node is None or bound is None:
            continue
        subject = context.on_gpu("host.numa", gpu, SOFT, "sysfs")
        wanted = f"node {gpu.numa_node}, the GPU's own"
        if bound == gpu.numa_node:
            yield subject.passes(f"node {bound}", wanted)
        else:
            yield subject.fails(
                f"node {bound}",
                wanted,
                f"the GPU hangs on memory node {gpu.numa_node}, this process is bound to "
                f"node {bound}",
                remedy="bind the container to the GPU's node (compose: cpuset)",
                scope="edit_config",
            )
