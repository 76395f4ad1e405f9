"""Whether CUDA works on every GPU: a context, 1 MiB there and back, the kernels' self-test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import HARD, Context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.facts import GpuFacts
    from healthchecks.result import CheckResult


def check(context: Context) -> Iterator[CheckResult]:
    """Judge what CUDA did; NVML alone proves nothing."""
    for gpu in context.gpus:
        yield _alloc(context, gpu)
        yield from _selftest(context, gpu)


def _alloc(context: Context, gpu: GpuFacts) -> CheckResult:
    subject = context.on_gpu("gpu.alloc", gpu, HARD, "cuda")
    wanted = "a context and 1 MiB there and back"
    if gpu.alloc is None:
        return subject.missing("alloc", wanted)
    if gpu.alloc == "ok":
        return subject.passes("ok", wanted)
    if context.facts.uvm_node is False:
        return subject.fails(
            gpu.alloc,
            wanted,
            f"NVML answers and CUDA does not ({gpu.alloc}): /dev/nvidia-uvm is absent",
            remedy=(
                "on the host: modprobe nvidia-uvm and nvidia-modprobe -u; give the container "
                "the node"
            ),
            scope="restart_container",
        )
    return subject.fails(
        gpu.alloc,
        wanted,
        f"CUDA does not work on the GPU ({gpu.alloc})",
        remedy="see Xid lines in the host's kernel log; reset the GPU or reboot",
        scope="reset_gpu",
    )


def _selftest(context: Context, gpu: GpuFacts) -> Iterator[CheckResult]:
    if gpu.selftest is None:
        return
    subject = context.on_gpu("gpu.selftest", gpu, HARD, "cuda")
    wanted = "the stored checksum"
    if gpu.selftest == "ok":
        yield subject.passes("ok", wanted)
    elif not gpu.selftest.startswith("wrong"):
        yield subject.unknown(
            gpu.selftest, wanted, f"the kernels' self-test did not end ({gpu.selftest})"
        )
    else:
        yield subject.fails(
            gpu.selftest,
            wanted,
            f"the kernels compute wrong values on this card ({gpu.selftest})",
            remedy="run it again; if it fails again, replace the card",
            scope="hardware_service",
        )
