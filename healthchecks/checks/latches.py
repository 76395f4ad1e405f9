"""Faults of earlier runs that still count, and the state file they are kept in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import HARD, SOFT, Context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.facts import GpuFacts
    from healthchecks.result import CheckResult
    from healthchecks.state import Latch

_CURES = {"boot": "reboot the host", "driver_reload": "reset the GPU, reload the driver or reboot"}
_SCOPES = {"boot": "reboot", "driver_reload": "reload_driver"}


def check(context: Context) -> Iterator[CheckResult]:
    """Judge the latches of every GPU of the plan that the machine does not show again by itself."""
    if context.state.note:
        yield context.on_host("gate.state", SOFT, "state").fails(
            context.state.note,
            "a readable state file",
            f"what was remembered of this machine is not usable: {context.state.note}",
            remedy="keep gate.state_dir on a volume; growth of errors is judged from this run on",
            scope="edit_config",
        )
    if context.facts.host_action is not None:
        yield context.on_host("host.action", HARD, "state").fails(
            context.facts.host_action,
            "nothing is left to do on the host",
            f"the host needs a hand before another start: {context.facts.host_action}",
            remedy="reboot the host",
            scope="reboot",
            fixed=True,
        )
    for gpu in context.gpus:
        known = context.remembered(gpu)
        for latch in () if known is None else known.latched:
            if not _shown_now(context, gpu, latch):
                yield _still(context, gpu, latch)


def _shown_now(context: Context, gpu: GpuFacts, latch: Latch) -> bool:
    if latch.check.startswith("xid."):
        number = int(latch.check.removeprefix("xid."))
        return any(
            event.gpu in (None, gpu.index) and event.xid == number
            for event in context.facts.kernel.xids
        )
    if latch.check == "ecc.dbe.volatile":
        return bool(gpu.ecc.volatile_dbe)
    return any(status in ("gpu_is_lost", "reset_required") for status in gpu.read_status.values())


def _still(context: Context, gpu: GpuFacts, latch: Latch) -> CheckResult:
    cure = _CURES.get(latch.clears_on, f"repair it, then `appliance gate ack {latch.check}`")
    return context.on_gpu(latch.check, gpu, HARD, "state").fails(
        f"latched since {latch.since}",
        "no fault is latched",
        f"{latch.check} of {latch.since} still counts",
        remedy=cure,
        scope=_SCOPES.get(latch.clears_on, "hardware_service"),
        fixed=latch.clears_on == "ack",
        since=latch.since,
    )
