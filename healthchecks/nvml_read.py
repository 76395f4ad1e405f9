"""Reads one GPU or pair through the NVML binding: every call alone, every refusal noted."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from healthchecks.facts import (
    EccFacts,
    GpuFacts,
    LinkFacts,
    PairFacts,
    PcieFacts,
    PowerFacts,
    RetiredFacts,
    ThermalFacts,
)

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

Binding = Any
"""The module pynvml, which has no types."""

Handle = Any
"""A device handle of the binding."""

ERROR_NAMES = {
    3: "not_supported",
    4: "no_permission",
    9: "driver_not_loaded",
    10: "timeout",
    12: "library_not_found",
    13: "function_not_found",
    14: "corrupted_inforom",
    15: "gpu_is_lost",
    16: "reset_required",
    18: "version_mismatch",
    999: "unknown_error",
}
"""NVML error numbers that have a meaning here (nvml.h); the others read `error:N`."""

P2P_STATUS = (
    "OK",
    "CHIPSET_NOT_SUPPORTED",
    "GPU_NOT_SUPPORTED",
    "TOPOLOGY_NOT_SUPPORTED",
    "DISABLED_BY_REGKEY",
    "NOT_SUPPORTED",
    "UNKNOWN",
)
TOPOLOGY = {0: "INTERNAL", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")
CLOCK_REASONS = {
    0x01: "gpu_idle",
    0x02: "application_clocks",
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
_LOCATIONS = {0: "l1", 1: "l2", 2: "device", 3: "register", 6: "cbu"}
_CORRECTED, _UNCORRECTED = 0, 1
_VOLATILE, _AGGREGATE = 0, 1
_SINGLE_BIT_PAGES, _DOUBLE_BIT_PAGES = 0, 1
_FIELD_MEMORY_TEMP, _FIELD_PENDING_SBE, _FIELD_PENDING_DBE = 82, 92, 93
_VOLTA_LINKS = 6
_LOST = frozenset({"gpu_is_lost", "reset_required"})
POWER_TRIES = 3
_POWER_PAUSE_S = 0.05


def error_name(code: int) -> str:
    """Return the read status of an NVML error number."""
    return ERROR_NAMES.get(code, f"error:{code}")


class Reader:
    """Calls the binding for one GPU or pair and notes in `status` how each read went."""

    def __init__(self, nvml: Binding) -> None:
        """Keep the binding; `status` starts empty."""
        self.nvml = nvml
        self.status: dict[str, str] = {}

    def read(self, name: str, call: Callable[[], T]) -> T | None:
        """Return what `call` returned, or None with the reason under `name`."""
        try:
            value = call()
        except self.nvml.NVMLError as error:
            self.status[name] = error_name(int(error.value))
            return None
        except self.nvml.NVMLLibraryMismatchError:
            # Outside NVMLError: raised when the library lacks the newest form of a call.
            self.status[name] = "function_not_found"
            return None
        self.status[name] = "ok"
        return value

    @property
    def lost(self) -> bool:
        """Whether a read said that the GPU is gone; further reads only cost time."""
        return not _LOST.isdisjoint(self.status.values())


def read_gpu(nvml: Binding, index: int) -> GpuFacts:
    """Read everything NVML says of one GPU; a refusal is a read status, never an exception."""
    reader = Reader(nvml)
    handle = reader.read("handle", lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    if handle is None:
        return GpuFacts(index=index, read_status=reader.status)
    memory = reader.read("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    capability = reader.read(
        "compute_capability", lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle)
    )
    mode = reader.read("compute_mode", lambda: int(nvml.nvmlDeviceGetComputeMode(handle)))
    persistence = reader.read(
        "persistence", lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle))
    )
    return GpuFacts(
        index=index,
        uuid=reader.read("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
        bus_id=reader.read("bus_id", lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        name=reader.read("name", lambda: _text(nvml.nvmlDeviceGetName(handle))),
        serial=reader.read("serial", lambda: _text(nvml.nvmlDeviceGetSerial(handle))),
        compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
        memory_total_bytes=None if memory is None else int(memory.total),
        memory_free_bytes=None if memory is None else int(memory.free),
        process_pids=_processes(reader, handle),
        persistence=persistence,
        compute_mode=_entry(COMPUTE_MODES, mode),
        utilization_percent=reader.read(
            "utilization_percent", lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        ),
        sm_clock_mhz=reader.read(
            "sm_clock_mhz", lambda: int(nvml.nvmlDeviceGetClockInfo(handle, 1))
        ),
        mem_clock_mhz=reader.read(
            "mem_clock_mhz", lambda: int(nvml.nvmlDeviceGetClockInfo(handle, 2))
        ),
        inforom_valid=_inforom(reader, handle),
        ecc=_ecc(reader, handle),
        retired=_retired(reader, handle),
        pcie=read_pcie(reader, handle),
        thermal=_thermal(reader, handle),
        power=_power(reader, handle),
        links=_links(reader, handle),
        read_status=reader.status,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _entry(names: tuple[str, ...], number: int | None) -> str | None:
    if number is None:
        return None
    return names[number] if 0 <= number < len(names) else str(number)


def _processes(reader: Reader, handle: Handle) -> tuple[int, ...] | None:
    """Ask for the processes; driver 470 has only the second form of the call."""
    nvml, name = reader.nvml, "process_pids"
    found = reader.read(name, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    if found is None and reader.status[name] == "function_not_found":
        found = reader.read(name, lambda: nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle))
    return None if found is None else tuple(int(item.pid) for item in found)


def _inforom(reader: Reader, handle: Handle) -> bool | None:
    reader.read("inforom_valid", lambda: reader.nvml.nvmlDeviceValidateInforom(handle))
    return {"ok": True, "corrupted_inforom": False}.get(reader.status["inforom_valid"])


def _ecc(reader: Reader, handle: Handle) -> EccFacts:
    nvml = reader.nvml

    def total(name: str, error: int, counter: int) -> int | None:
        return reader.read(
            f"ecc.{name}", lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, error, counter))
        )

    def at(place: str, number: int) -> int | None:
        return reader.read(
            f"ecc.volatile_dbe_at.{place}",
            lambda: int(
                nvml.nvmlDeviceGetMemoryErrorCounter(handle, _UNCORRECTED, _VOLATILE, number)
            ),
        )

    mode = reader.read("ecc.mode_current", lambda: nvml.nvmlDeviceGetEccMode(handle))
    reader.status["ecc.mode_pending"] = reader.status["ecc.mode_current"]
    places: dict[str, int] = {}
    for number, place in _LOCATIONS.items():
        found = at(place, number)
        if found is not None:
            places[place] = found
    return EccFacts(
        mode_current=None if mode is None else bool(mode[0]),
        mode_pending=None if mode is None else bool(mode[1]),
        volatile_sbe=total("volatile_sbe", _CORRECTED, _VOLATILE),
        volatile_dbe=total("volatile_dbe", _UNCORRECTED, _VOLATILE),
        aggregate_sbe=total("aggregate_sbe", _CORRECTED, _AGGREGATE),
        aggregate_dbe=total("aggregate_dbe", _UNCORRECTED, _AGGREGATE),
        volatile_dbe_at=places,
    )


def _retired(reader: Reader, handle: Handle) -> RetiredFacts:
    nvml = reader.nvml

    def pages(name: str, cause: int) -> int | None:
        return reader.read(
            f"retired.{name}", lambda: len(nvml.nvmlDeviceGetRetiredPages(handle, cause))
        )

    pending = reader.read(
        "retired.pending", lambda: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
    )
    by_sbe = _field(reader, handle, "retired.pending_sbe", _FIELD_PENDING_SBE)
    by_dbe = _field(reader, handle, "retired.pending_dbe", _FIELD_PENDING_DBE)
    return RetiredFacts(
        sbe=pages("sbe", _SINGLE_BIT_PAGES),
        dbe=pages("dbe", _DOUBLE_BIT_PAGES),
        pending=pending,
        pending_sbe=None if by_sbe is None else by_sbe > 0,
        pending_dbe=None if by_dbe is None else by_dbe > 0,
    )


def _field(reader: Reader, handle: Handle, name: str, number: int) -> int | None:
    """Read one field value; its own return code counts, not only that of the call."""
    nvml = reader.nvml

    def call() -> int:
        found = nvml.nvmlDeviceGetFieldValues(handle, [number])[0]
        if found.nvmlReturn != 0:
            raise nvml.NVMLError(found.nvmlReturn)
        return int(found.value.uiVal)

    return reader.read(name, call)


def read_pcie(reader: Reader, handle: Handle) -> PcieFacts:
    """Read the link of one GPU."""
    nvml = reader.nvml
    return PcieFacts(
        width=reader.read("pcie.width", lambda: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))),
        width_max=reader.read(
            "pcie.width_max", lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
        ),
        generation=reader.read(
            "pcie.generation", lambda: int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))
        ),
        generation_max=reader.read(
            "pcie.generation_max", lambda: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
        ),
        replays=reader.read(
            "pcie.replays", lambda: int(nvml.nvmlDeviceGetPcieReplayCounter(handle))
        ),
    )


def _thermal(reader: Reader, handle: Handle) -> ThermalFacts:
    nvml = reader.nvml

    def limit(name: str, number: int) -> int | None:
        return reader.read(
            f"thermal.{name}", lambda: int(nvml.nvmlDeviceGetTemperatureThreshold(handle, number))
        )

    bits = reader.read(
        "thermal.reasons", lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    )
    return ThermalFacts(
        gpu_c=reader.read("thermal.gpu_c", lambda: int(nvml.nvmlDeviceGetTemperature(handle, 0))),
        hbm_c=_field(reader, handle, "thermal.hbm_c", _FIELD_MEMORY_TEMP),
        shutdown_c=limit("shutdown_c", 0),
        slowdown_c=limit("slowdown_c", 1),
        hbm_max_c=limit("hbm_max_c", 2),
        gpu_max_c=limit("gpu_max_c", 3),
        reasons=None
        if bits is None
        else tuple(name for bit, name in CLOCK_REASONS.items() if bits & bit),
    )


def _power(reader: Reader, handle: Handle) -> PowerFacts:
    nvml = reader.nvml
    draw, failed = None, 0
    while draw is None and failed < POWER_TRIES and not reader.lost:
        if failed:
            time.sleep(_POWER_PAUSE_S)
        draw = reader.read("power.draw_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        failed += draw is None
    constraints = reader.read(
        "power.min_w", lambda: nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
    )
    return PowerFacts(
        draw_w=draw,
        limit_w=reader.read(
            "power.limit_w", lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
        ),
        default_w=reader.read(
            "power.default_w", lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000
        ),
        min_w=None if constraints is None else constraints[0] / 1000,
        failed_reads=failed,
    )


def _links(reader: Reader, handle: Handle) -> tuple[LinkFacts, ...] | None:
    """Read the lanes of an SXM board; a PCIe board refuses the first one and has none."""
    lanes: list[LinkFacts] = []
    for link in range(_VOLTA_LINKS):
        name = f"links.{link}"
        active = reader.read(name, partial(_lane_state, reader.nvml, handle, link))
        if active is None:
            absent = reader.status[name] in ("not_supported", "function_not_found", "error:2")
            return tuple(lanes) if absent else None
        lanes.append(_lane(reader, handle, link, active=active))
    return tuple(lanes)


def _lane_state(nvml: Binding, handle: Handle, link: int) -> bool:
    return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))


def _lane(reader: Reader, handle: Handle, link: int, *, active: bool) -> LinkFacts:
    nvml = reader.nvml
    if not active:
        return LinkFacts(link=link, active=False)

    def errors(name: str, number: int) -> int | None:
        return reader.read(
            f"links.{link}.{name}",
            lambda: int(nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, number)),
        )

    remote = reader.read(
        f"links.{link}.remote",
        lambda: _text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId),
    )
    return LinkFacts(
        link=link,
        active=True,
        remote_bus_id=remote,
        replays=errors("replays", 0),
        recoveries=errors("recoveries", 1),
        crc_errors=errors("crc_errors", 2),
    )


def read_pair(nvml: Binding, first: GpuFacts, second: GpuFacts) -> PairFacts:
    """Read what NVML says of the way between two GPUs, both directions."""
    reader = Reader(nvml)
    a = reader.read("handle_a", lambda: nvml.nvmlDeviceGetHandleByIndex(first.index))
    b = reader.read("handle_b", lambda: nvml.nvmlDeviceGetHandleByIndex(second.index))
    if a is None or b is None:
        return PairFacts(first.index, second.index, read_status=reader.status)
    level = reader.read("topology", lambda: int(nvml.nvmlDeviceGetTopologyCommonAncestor(a, b)))

    def status(name: str, source: Handle, target: Handle, what: int) -> str | None:
        number = reader.read(name, lambda: int(nvml.nvmlDeviceGetP2PStatus(source, target, what)))
        return _entry(P2P_STATUS, number)

    return PairFacts(
        a=first.index,
        b=second.index,
        nvlink_lanes=lanes_between(first, second),
        topology=None if level is None else TOPOLOGY.get(level, str(level)),
        read_ab=status("read_ab", a, b, 0),
        read_ba=status("read_ba", b, a, 0),
        write_ab=status("write_ab", a, b, 1),
        write_ba=status("write_ba", b, a, 1),
        read_status=reader.status,
    )


def lanes_between(first: GpuFacts, second: GpuFacts) -> int | None:
    """Count the active lanes of `first` that end at `second`; None when the lanes are not known."""
    if first.links is None or second.bus_id is None:
        return None
    target = _bus(second.bus_id)
    return sum(
        1 for lane in first.links if lane.active and _bus(lane.remote_bus_id or "") == target
    )


def _bus(bus_id: str) -> str:
    """Return the bus id without its domain's leading zeros, which calls write in two lengths."""
    return bus_id.lower().lstrip("0")
