"""Whether NVML opens and every GPU answers in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import Context, gpu_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.result import CheckResult

_REMEDIES = {
    "driver_not_loaded": ("load the NVIDIA driver on the host (modprobe nvidia)", "reload_driver"),
    "library_not_found": (
        "give the container the GPU: install the NVIDIA container toolkit and reserve the devices",
        "restart_container",
    ),
    "binding_not_found": ("install the Python package nvidia-ml-py", "none"),
    "version_mismatch": (
        "reboot or reload the driver: its library was upgraded under the loaded module",
        "reboot",
    ),
    "no_permission": ("give this user access to /dev/nvidiactl", "edit_config"),
    "unknown_error": (
        "start the container again: it lost its devices, most often to a systemd reload",
        "restart_container",
    ),
    "timeout": ("look for Xid lines in the host's kernel log, then reboot the host", "reboot"),
}


def check(context: Context) -> Iterator[CheckResult]:
    """Judge the opening of NVML, then the answers of the plan's GPUs."""
    facts = context.facts
    subject = context.on_host("nvml.init")
    if facts.nvml == "timeout":
        yield _late(context)
    elif facts.nvml != "ok":
        remedy, scope = _REMEDIES.get(facts.nvml, ("see the driver's log on the host", "none"))
        message = f"NVML does not open: {facts.nvml_detail or facts.nvml}"
        yield subject.fails(
            facts.nvml, "NVML opens", message, remedy=remedy, scope=scope, fixed=True
        )
    else:
        yield subject.passes(f"driver {facts.driver_version or 'not shown'}", "NVML opens")
    yield from _wedged(context)
    yield from _silent(context)


def _late(context: Context) -> CheckResult:
    limit = f"an answer in {context.policy.timeout_s:g} s"
    return context.on_host("nvml.timeout").unknown(
        context.facts.nvml_detail or "no answer",
        limit,
        "NVML does not answer",
        remedy=_REMEDIES["timeout"][0],
        fixed=True,
    )


def _wedged(context: Context) -> Iterator[CheckResult]:
    """Judge processes that cannot be killed: they prove what a deadline only suggests."""
    pids = context.facts.wedged_pids
    if not pids:
        return
    named = ", ".join(str(pid) for pid in pids if pid > 0)
    yield context.on_host("nvml.wedged").fails(
        f"hung in the driver: pid {named}" if named else "NVML calls block",
        "no process hangs in the driver",
        "the driver hangs, and whoever calls it cannot be killed",
        remedy="reboot the host; if it comes back, power cycle and look at the card",
        scope="power_cycle",
        fixed=True,
    )


def _silent(context: Context) -> Iterator[CheckResult]:
    limit = f"an answer in {context.policy.gpu_timeout_s:g} s"
    for gpu in context.facts.gpus:
        status = gpu.read_status.get("*", "")
        if not status.startswith(("timeout", "crash")):
            continue
        yield context.on_host("nvml.timeout").unknown(
            status,
            limit,
            f"{gpu_name(gpu)} does not answer NVML",
            remedy=_REMEDIES["timeout"][0],
            fixed=True,
        )
