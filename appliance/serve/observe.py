"""What can be seen of a silent engine from outside: compilers, GPUs busy or cold, memory kills."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.serve import procfs
from appliance.serve.diagnose import Observation, RankReading
from healthchecks.nvml import NvmlUnavailable, read_host

if TYPE_CHECKING:
    from appliance.plan.launch_plan import LaunchPlan
    from healthchecks.facts import GpuFacts

COMPILERS = frozenset({"cc1", "cc1plus", "cicc", "ninja", "nvcc", "ptxas", "ld"})
READ_TIMEOUT_S = 10.0
_MEMORY_EVENTS = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)


def observe(plan: LaunchPlan) -> Observation:
    """Look at the processes below this one and at the plan's GPUs; blocks for seconds at most."""
    return Observation(ranks=_ranks(plan), compiler=_compiler())


def rank_reading(rank: int, gpu: GpuFacts | None) -> RankReading:
    """Return what one GPU says of its rank; a GPU that does not answer says nothing."""
    if gpu is None:
        return RankReading(rank, alive=True)
    share = None
    if gpu.power.draw_w is not None and gpu.power.limit_w:
        share = gpu.power.draw_w / gpu.power.limit_w
    return RankReading(
        rank, alive=True, utilization_percent=gpu.utilization_percent, power_share=share
    )


def oom_kills(paths: tuple[Path, ...] = _MEMORY_EVENTS) -> int:
    """Return how often the kernel killed a process of this container for memory, 0 if unknown."""
    for path in paths:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdigit():
                return int(count)
    return 0


def _ranks(plan: LaunchPlan) -> tuple[RankReading, ...]:
    if plan.execution.device != "cuda":
        return ()
    try:
        host = read_host(timeout_s=READ_TIMEOUT_S, gpu_timeout_s=READ_TIMEOUT_S / 2)
    except NvmlUnavailable:
        return ()
    by_uuid = {gpu.uuid: gpu for gpu in host.gpus}
    return tuple(rank_reading(i, by_uuid.get(uuid)) for i, uuid in enumerate(plan.parallel.gpus))


def _compiler() -> str | None:
    for row in procfs.family(procfs.table(), root=os.getpid(), session=None):
        try:
            name = Path(f"/proc/{row.pid}/comm").read_text().strip()
        except OSError:
            continue
        if name in COMPILERS:
            return name
    return None
