"""What the container was given: shared memory and host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import HARD, SOFT, Context
from healthchecks.policy import HOST_MEMORY_MARGIN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.result import CheckResult

_MIB = 1024**2
_NEEDED_SHM_BYTES = 1024**3
"""What NCCL and the workers use of /dev/shm; enough where no container limits it."""


def check(context: Context) -> Iterator[CheckResult]:
    """Judge /dev/shm and memory against the plan."""
    yield from _shm(context)
    yield from _memory(context)


def _shm(context: Context) -> Iterator[CheckResult]:
    have, planned = context.facts.shm_bytes, context.plan.shm_bytes
    if planned is None or have is None:
        return
    inside = context.facts.in_container is not False
    need = planned if inside else min(planned, _NEEDED_SHM_BYTES)
    subject = context.on_host("host.shm", HARD if context.parallel else SOFT, "sysfs")
    wanted = f"at least {need // _MIB} MiB"
    if have >= need:
        yield subject.passes(f"{have // _MIB} MiB", wanted)
    else:
        yield subject.fails(
            f"{have // _MIB} MiB",
            wanted,
            f"shared memory has {have // _MIB} MiB, the plan needs {need // _MIB} MiB",
            remedy=(
                "set shm_size of the container as `appliance render` prints it; ipc: host "
                "ignores it"
            ),
            scope="edit_config",
            value=need - have,
        )


def _memory(context: Context) -> Iterator[CheckResult]:
    facts = context.facts
    shard = facts.largest_shard_bytes
    have = facts.memory_available_bytes
    if have is None or shard is None:
        return
    need = shard * max(1, len(context.plan.uuids)) + HOST_MEMORY_MARGIN_BYTES
    subject = context.on_host("host.memory", HARD, "sysfs")
    limit = (
        f", container limit {facts.memory_limit_bytes // _MIB} MiB"
        if facts.memory_limit_bytes
        else ""
    )
    observed, wanted = f"{have // _MIB} MiB available{limit}", f"at least {need // _MIB} MiB"
    if have >= need:
        yield subject.passes(observed, wanted)
    else:
        yield subject.fails(
            observed,
            wanted,
            f"{have // _MIB} MiB of host memory{limit}; loading needs {need // _MIB} MiB "
            "(this is not GPU memory)",
            remedy="raise the container's memory limit or free host memory",
            scope="edit_config",
            value=need - have,
        )
