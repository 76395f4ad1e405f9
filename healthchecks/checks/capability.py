"""Whether every GPU of the plan is a Volta."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.policy import COMPUTE_CAPABILITY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.context import Context
    from healthchecks.result import CheckResult


def check(context: Context) -> Iterator[CheckResult]:
    """Judge the compute capability; the product name proves nothing."""
    wanted = "compute capability {}.{}".format(*COMPUTE_CAPABILITY)
    for gpu in context.gpus:
        subject = context.on_gpu("gpu.cc", gpu)
        if gpu.compute_capability is None:
            yield subject.missing("compute_capability", wanted)
            continue
        found = "{}.{}".format(*gpu.compute_capability)
        if gpu.compute_capability == COMPUTE_CAPABILITY:
            yield subject.passes(found, wanted)
        else:
            yield subject.fails(
                found,
                wanted,
                f"compute capability {found}; the kernels here are built for V100 (7.0)",
                remedy="choose V100s in parallel.gpus",
                scope="edit_config",
                fixed=True,
            )
