"""GPU errors that the kernel log or NVML events reported since this boot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import HARD, INFO, SOFT, Context
from healthchecks.policy import FATAL_XIDS, NVLINK_XID, WARN_XIDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.facts import GpuFacts, XidFacts
    from healthchecks.result import CheckResult, Severity

MEANINGS = {
    48: ("an uncorrected memory error", "reset the GPU or reboot", "reset_gpu"),
    62: (
        "the GPU's own controller halted",
        "power cycle; then look at power and cooling",
        "power_cycle",
    ),
    63: ("a page was recorded for retirement", "reboot at the next pause", "reload_driver"),
    64: (
        "a page could not be retired",
        "replace the card, then `appliance gate ack`",
        "hardware_service",
    ),
    74: ("an NVLink error", "reset both GPUs, reseat the boards", "reset_gpu"),
    79: ("the GPU fell off the bus", "power cycle; check power supply and seating", "power_cycle"),
    92: ("many corrected memory errors", "plan a replacement of the card", "hardware_service"),
    93: (
        "the InfoROM is written too often",
        "look for a program that changes settings in a loop",
        "none",
    ),
    94: ("a contained memory error", "reset the GPU", "reset_gpu"),
    95: ("an uncontained memory error", "reset the GPU", "reset_gpu"),
}
_APPLICATION = frozenset({13, 31, 43, 45})


def check(context: Context) -> Iterator[CheckResult]:
    """Judge every Xid of this boot on the plan's GPUs."""
    log = context.facts.kernel.log
    subject = context.on_host("xid.log", INFO, "kmsg")
    if log == "unavailable":
        yield subject.skipped("kernel log unavailable; Xids before this start are not known")
    elif log == "read":
        yield subject.passes(f"{len(context.facts.kernel.xids)} kinds of Xid since boot")
    selected = {gpu.index: gpu for gpu in context.gpus}
    for event in context.facts.kernel.xids:
        # A line whose bus id fits no GPU seen may be the GPU that fell off: it counts against all.
        hit = list(selected.values()) if event.gpu is None else [selected.get(event.gpu)]
        for gpu in filter(None, hit):
            yield _judge(context, gpu, event)


def _judge(context: Context, gpu: GpuFacts, event: XidFacts) -> CheckResult:
    meaning, remedy, scope = MEANINGS.get(event.xid, ("see NVIDIA's Xid catalogue", "", "none"))
    if event.xid in _APPLICATION:
        meaning = "an application's fault or its clean-up"
    times = f"Xid {event.xid}" + (f" x{event.count}" if event.count > 1 else "")
    return context.on_gpu(f"xid.{event.xid}", gpu, _severity(context, event), event.source).fails(
        times,
        "none since boot",
        f"{times}: {meaning}",
        remedy=remedy,
        scope=scope,
        value=event.count,
        fixed=event.xid in {64, 79},
    )


def _severity(context: Context, event: XidFacts) -> Severity:
    if event.xid in FATAL_XIDS:
        return HARD
    if event.xid == NVLINK_XID:
        return HARD if any(pair.nvlink_lanes for pair in context.pairs) else SOFT
    return SOFT if event.xid in WARN_XIDS else INFO
