"""Whether the GPUs are free for this plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import HARD, Context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.facts import GpuFacts
    from healthchecks.result import CheckResult

_MIB = 1024**2


def check(context: Context) -> Iterator[CheckResult]:
    """Judge free memory, foreign processes and the compute mode of every GPU of the plan."""
    for gpu in context.gpus:
        yield _memory(context, gpu)
        yield from _held(context, gpu)
        yield _mode(context, gpu)


def _memory(context: Context, gpu: GpuFacts) -> CheckResult:
    subject = context.on_gpu("gpu.busy", gpu, HARD)
    share = context.plan.utilization
    if share is None:
        return subject.skipped("no plan says how much memory is needed")
    if gpu.memory_free_bytes is None or gpu.memory_total_bytes is None:
        return subject.missing("memory", f"{share:.0%} of the memory free")
    need, have = int(share * gpu.memory_total_bytes), gpu.memory_free_bytes
    observed = f"{have // _MIB} MiB free of {gpu.memory_total_bytes // _MIB} MiB"
    wanted = f"{need // _MIB} MiB free ({share:.0%}) and no other process"
    holders = ", ".join(str(pid) for pid in gpu.process_pids or ())
    if have >= need and not holders:
        return subject.passes(observed, wanted)
    who = f"held by pid {holders}" if holders else "the holder is outside this pid namespace"
    return subject.fails(
        f"{observed}, {who}",
        wanted,
        f"the GPU is in use: {observed}, {need // _MIB} MiB needed; {who}",
        remedy="stop the other program, or lower memory.gpu_memory_utilization",
        scope="edit_config",
        value=need - have,
    )


def _held(context: Context, gpu: GpuFacts) -> Iterator[CheckResult]:
    owner = context.facts.holders.get(gpu.uuid or "")
    if owner is not None:
        yield context.on_gpu("gpu.locked", gpu, HARD, "state").fails(
            owner,
            "no other appliance",
            f"another appliance holds the GPU: {owner}",
            remedy="stop the other one, or give it its own gate.state_dir and GPUs",
            scope="edit_config",
        )


def _mode(context: Context, gpu: GpuFacts) -> CheckResult:
    subject = context.on_gpu("gpu.compute_mode", gpu, HARD)
    if gpu.compute_mode is None:
        return subject.missing("compute_mode", "not prohibited")
    if gpu.compute_mode != "prohibited":
        return subject.passes(gpu.compute_mode, "not prohibited")
    return subject.fails(
        "prohibited",
        "not prohibited",
        "the compute mode forbids every program",
        remedy=f"nvidia-smi -i {gpu.index} -c DEFAULT as root",
    )
