"""Whether the GPUs of the plan are there, and whether the host shows as many as it should."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import HARD, SOFT, Context, Evidence, Subject
from healthchecks.facts import NOT_SHOWN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.facts import GpuFacts
    from healthchecks.result import CheckResult

_GONE = {"gpu_is_lost": "is lost", "reset_required": "must be reset"}


def check(context: Context) -> Iterator[CheckResult]:
    """Judge every selected GPU, their likeness, and the count on the host."""
    if context.facts.nvml != "ok":
        return
    yield from _selected(context)
    yield from _mixed(context)
    yield from _count(context)
    yield from _unlinked(context)


def _selected(context: Context) -> Iterator[CheckResult]:
    found = {gpu.uuid: gpu for gpu in context.facts.gpus}
    for uuid in context.plan.uuids:
        gpu = found.get(uuid)
        if gpu is None:
            yield _absent(context, uuid)
        elif state := _gone(gpu):
            yield context.on_gpu("gpu.present", gpu).fails(
                state,
                "the GPU answers",
                f"the GPU {_GONE.get(state, state)}",
                remedy="reset the GPU or reboot; look for Xid 79 in the host's kernel log",
                scope="reboot",
            )
        elif gpu.read_status.get("*", NOT_SHOWN) != NOT_SHOWN:
            yield context.on_gpu("gpu.present", gpu).unknown(
                gpu.read_status["*"], "the GPU answers", "the GPU does not answer"
            )
        else:
            yield context.on_gpu("gpu.present", gpu).passes("answers", "the GPU answers")


def _absent(context: Context, uuid: str) -> CheckResult:
    seen = ", ".join(gpu.uuid or f"index {gpu.index}" for gpu in context.facts.gpus) or "none"
    scope = f"gpu:{uuid}"
    subject = Subject("gpu.present", scope, f"GPU {uuid}", HARD, "nvml", context.evidence, {})
    silent = any("*" in gpu.read_status for gpu in context.facts.gpus)
    if context.evidence is not Evidence.LIVE:
        return subject.unknown("not shown", "the GPU answers", "not shown by the record")
    if silent:
        return subject.unknown("a GPU is silent", "the GPU answers", "it may be the silent one")
    return subject.fails(
        f"visible: {seen}",
        "the GPU of the plan is visible",
        "the GPU of the plan is not visible",
        remedy="set parallel.gpus to GPUs that are there, or give the container this one",
        scope="edit_config",
    )


def _gone(gpu: GpuFacts) -> str | None:
    return next((status for status in gpu.read_status.values() if status in _GONE), None)


def _mixed(context: Context) -> Iterator[CheckResult]:
    kinds = {(gpu.name, gpu.memory_total_bytes) for gpu in context.gpus if gpu.name}
    if len(context.gpus) < 2 or not kinds:  # noqa: PLR2004 - a pair
        return
    subject = context.on_host("gpu.mixed", SOFT)
    names = ", ".join(sorted(f"{name} {total or 0} bytes" for name, total in kinds))
    if len(kinds) > 1:
        yield subject.fails(
            names,
            "GPUs of one model and size",
            "the plan's GPUs differ; the smaller and slower one sets the pace",
            remedy="choose two equal GPUs in parallel.gpus",
            scope="edit_config",
        )
    else:
        yield subject.passes(names, "GPUs of one model and size")


def _count(context: Context) -> Iterator[CheckResult]:
    expected = context.facts.gpus_expected or context.policy.expected_gpus
    if expected is None:
        return
    subject = context.on_host("host.gpu_count", SOFT)
    shown = context.facts.gpus_visible
    seen = len(context.facts.gpus) if shown is None else shown
    if seen < expected:
        yield subject.fails(
            f"{seen} GPUs",
            f"{expected} GPUs",
            f"{seen} of {expected} GPUs are there",
            remedy="reboot; if the GPU stays away, reseat or replace it",
            scope="hardware_service",
            value=expected - seen,
        )
    else:
        yield subject.passes(f"{seen} GPUs", f"{expected} GPUs")


def _unlinked(context: Context) -> Iterator[CheckResult]:
    """More GPUs on the bus than the driver took means that one did not start."""
    on_bus, taken = context.facts.pci_gpus, len(context.facts.gpus)
    if on_bus is None or on_bus <= taken:
        return
    yield context.on_host("host.gpu_unlinked", SOFT, "sysfs").fails(
        f"{taken} of {on_bus} GPUs on the bus",
        "the driver took every GPU on the bus",
        f"{on_bus - taken} GPUs are on the bus and not with the driver",
        remedy=(
            "see the host's kernel log for NVRM lines; in a container, give it the GPU if it is "
            "meant for it"
        ),
        scope="reboot",
    )
