"""Which devices a plan may use, and how much of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.plan.candidate import Card
from appliance.plan.launch_plan import Decision
from appliance.units import GIB, format_bytes

if TYPE_CHECKING:
    from appliance.config.load import LoadedConfig
    from healthchecks.facts import GpuFacts, HostFacts

AUTO_UTILIZATION = 0.90
"""Field reports: above 0.93 starts begin to fail, at 0.95 the driver's own needs no longer fit."""

HEADROOM_BYTES = GIB // 2
_V100 = (7, 0)
_UNKNOWN_HOST_BYTES = 2**62


@dataclass(frozen=True)
class Cards:
    """Devices in the order in which ranks take them.

    Attributes:
        cards: The devices.
        utilization: Share of a GPU's whole memory the engine may hold; 0 on the CPU engine.
        decisions: What was resolved, with the reason.
        warnings: What deserves a second look.
    """

    cards: tuple[Card, ...]
    utilization: float
    decisions: tuple[Decision, ...] = ()
    warnings: tuple[str, ...] = ()


def cpu_cards(loaded: LoadedConfig, host: HostFacts) -> Cards:
    """Return the ranks of the CPU engine; each may hold its part of the host's memory."""
    ranks = loaded.config.parallel.cpu_ranks
    total = host.memory_total_bytes
    warnings = (
        () if total else ("the host's memory is unknown, so that nothing was held against it",)
    )
    share = (total or _UNKNOWN_HOST_BYTES) // ranks
    return Cards(tuple(Card("cpu", rank, share, share) for rank in range(ranks)), 0.0, (), warnings)


def gpu_cards(loaded: LoadedConfig, host: HostFacts) -> Cards:
    """Return the GPUs that the configuration names.

    Raises:
        ApplianceError: Exit 11 if there is no GPU, one that is named is absent, or its memory
            could not be read.
    """
    gpus = _selected(loaded, host)
    totals = {gpu.memory_total_bytes or 0 for gpu in gpus}
    warnings = [
        f"GPU {gpu.index} ({gpu.name}) has compute capability {'.'.join(map(str, capability))}; "
        "this appliance is made for 7.0"
        for gpu in gpus
        if (capability := gpu.compute_capability) is not None and capability != _V100
    ]
    if len(totals) > 1:
        sizes = ", ".join(format_bytes(total) for total in sorted(totals))
        warnings.append(f"GPUs of different memory are used together ({sizes}); the least decides")
    utilization, decisions = _utilization(loaded, gpus)
    cards = tuple(
        Card(
            gpu.uuid or f"index {gpu.index}",
            gpu.index,
            gpu.memory_total_bytes or 0,
            int((gpu.memory_total_bytes or 0) * utilization),
        )
        for gpu in gpus
    )
    return Cards(cards, utilization, decisions, tuple(warnings))


def _selected(loaded: LoadedConfig, host: HostFacts) -> list[GpuFacts]:
    where, wanted = loaded.where("parallel.gpus"), loaded.config.parallel.gpus
    if not host.gpus:
        fix = (
            "install the NVIDIA driver and container toolkit, set execution.device: cpu, or see "
            "`appliance plan --assume 2x16GiB`"
        )
        raise _no_gpu("GPU_MISSING", where, "at least one GPU", "none", fix)
    if wanted == "all":
        chosen = list(host.gpus)
    else:
        names: dict[int | str, GpuFacts] = {gpu.index: gpu for gpu in host.gpus}
        names.update({gpu.uuid: gpu for gpu in host.gpus if gpu.uuid})
        absent = [name for name in wanted if name not in names]
        if absent:
            what = "GPUs of this machine: " + ", ".join(str(name) for name in names)
            value, fix = ", ".join(map(str, absent)), "name GPUs that are there"
            raise _no_gpu("GPU_MISSING", where, what, value, fix)
        chosen = [names[name] for name in wanted]
    for gpu in chosen:
        if gpu.memory_total_bytes is None:
            what, fix = "its memory size from NVML", "run `appliance gate` for the reason"
            raise _no_gpu("GPU_UNREADABLE", f"gpu {gpu.index} {gpu.bus_id}", what, "nothing", fix)
    return chosen


def _utilization(loaded: LoadedConfig, gpus: list[GpuFacts]) -> tuple[float, tuple[Decision, ...]]:
    stated = loaded.config.memory.gpu_memory_utilization
    if stated != "auto":
        return stated, ()
    lowest, cause = AUTO_UTILIZATION, f"{AUTO_UTILIZATION:.2f} is the most that is safe"
    for gpu in gpus:
        total = gpu.memory_total_bytes or 0
        free = total if gpu.memory_free_bytes is None else gpu.memory_free_bytes
        # Downwards, so that the rounded share never asks for more than is free.
        share = math.floor((free - HEADROOM_BYTES) / total * 1000) / 1000
        if share < lowest:
            lowest = max(0.0, share)
            cause = f"GPU {gpu.index} has {format_bytes(free)} free, 0.5 GiB of it stays free"
    return lowest, (Decision("memory.gpu_memory_utilization", f"{lowest:g}", cause),)


def _no_gpu(code: str, where: str, what: str, value: str, fix: str) -> ApplianceError:
    return ApplianceError(ExitCode.NO_GPU, Fault(code, where, what, value, fix))
