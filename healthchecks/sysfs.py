"""What the kernel's own files say of links, memory, the container and the log.

Every function takes the file system's root, so that a copied tree can stand for a machine.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from healthchecks.facts import KernelFacts, XidFacts
from healthchecks.kernel_log import aer_errors, short_bus, this_boot, xids

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path("/")
_LOG_BYTES = 8 * 1024**2
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")
_STEERING = re.compile(r"(NCCL_\w+|VLLM_\w+|CUDA_\w+)")
_UNLIMITED_V1 = 1 << 60


@dataclass(frozen=True)
class LinkCounters:
    """PCIe errors of a GPU and the ports above it, and the node its slot belongs to."""

    correctable: int | None
    fatal: int | None
    width_max: int | None
    numa_node: int | None


@dataclass(frozen=True)
class HostMemory:
    """Host memory in bytes; `limit` is the container's, None without one."""

    total: int | None
    available: int | None
    limit: int | None


def sysfs_name(bus_id: str) -> str:
    """Return the folder name of a device: `0000:3b:00.0` of NVML's `00000000:3B:00.0`."""
    domain, rest = bus_id.lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def link_counters(bus_id: str, root: Path = ROOT) -> LinkCounters:
    """Read the counters of a GPU and of the ports above it."""
    device = root / "sys/bus/pci/devices" / sysfs_name(bus_id)
    chain = [device, *ports_above(device)]
    node = _number(device / "numa_node")
    return LinkCounters(
        correctable=_sum(_total(step / "aer_dev_correctable") for step in chain),
        fatal=_sum(
            _total(step / name) for step in chain for name in ("aer_dev_fatal", "aer_dev_nonfatal")
        ),
        width_max=_number(device / "max_link_width"),
        numa_node=node if node is not None and node >= 0 else None,
    )


def ports_above(device: Path) -> list[Path]:
    """Return the bridges and the root port above a device, nearest first."""
    try:
        real = device.resolve(strict=True)
    except OSError:
        return []
    return [
        step
        for step in real.parents
        if re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", step.name)
    ]


def pci_gpus(root: Path = ROOT) -> int | None:
    """Count the NVIDIA display controllers on the bus; None when the bus is not visible."""
    devices = root / "sys/bus/pci/devices"
    if not devices.is_dir():
        return None
    return sum(
        _text(device / "vendor") == _NVIDIA
        and _text(device / "class", "").startswith(_DISPLAY_CLASSES)
        for device in devices.iterdir()
    )


def host_memory(root: Path = ROOT) -> HostMemory:
    """Read memory of the host and the container's limit, cgroup version 2 or 1."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", _text(root / "proc/meminfo", ""), re.MULTILINE))
    total, free = (
        int(fields[name]) * 1024 if name in fields else None
        for name in ("MemTotal", "MemAvailable")
    )
    limit, used = _cgroup_memory(root)
    if limit is not None and free is not None:
        free = min(free, max(0, limit - (used or 0)))
    return HostMemory(total, free, limit)


def _cgroup_memory(root: Path) -> tuple[int | None, int | None]:
    """Return limit and use without the page cache, which the kernel gives back when asked."""
    base = root / "sys/fs/cgroup"
    for folder, limit_name, used_name in (
        (base, "memory.max", "memory.current"),
        (base / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit = _number(folder / limit_name)
        if limit is None or limit >= _UNLIMITED_V1:
            continue
        cached = re.search(
            r"^(?:total_)?inactive_file (\d+)", _text(folder / "memory.stat", ""), re.MULTILINE
        )
        used = _number(folder / used_name)
        return limit, None if used is None else max(0, used - int(cached[1] if cached else 0))
    return None, None


def shm_bytes(root: Path = ROOT) -> int | None:
    """Return the size of /dev/shm; in a copied tree the file `size` inside it says it."""
    path = root / "dev/shm"
    if root != ROOT:
        return _number(path / "size")
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def boot_id(root: Path = ROOT) -> str | None:
    """Return the host's boot id, which containers see too."""
    return _text(root / "proc/sys/kernel/random/boot_id") or None


def in_container(root: Path = ROOT) -> bool:
    """Tell whether a container engine left its mark."""
    return any((root / name).exists() for name in (".dockerenv", "run/.containerenv")) or bool(
        re.search(r"docker|kubepods|containerd|libpod", _text(root / "proc/1/cgroup", ""))
    )


def bound_node(root: Path = ROOT) -> int | None:
    """Return the memory node this process may use when it is a single one."""
    found = re.search(
        r"^Mems_allowed_list:\s*(\d+)\s*$", _text(root / "proc/self/status", ""), re.MULTILINE
    )
    return None if found is None else int(found[1])


def uvm_node(root: Path = ROOT) -> bool:
    """Tell whether CUDA's device node is there."""
    return (root / "dev/nvidia-uvm").exists()


def steering_variables(environment: dict[str, str] | None = None) -> dict[str, str]:
    """Return the inherited variables that steer NCCL, CUDA and the engine."""
    source = dict(os.environ) if environment is None else environment
    return {name: value for name, value in sorted(source.items()) if _STEERING.fullmatch(name)}


def largest_shard(model_path: str) -> int | None:
    """Return the bytes of the largest weight file of a checkpoint."""
    sizes = (
        [path.stat().st_size for path in Path(model_path).glob("*.safetensors")]
        if model_path
        else []
    )
    return max(sizes, default=None)


def kernel_facts(indexes: dict[str, int], root: Path = ROOT) -> KernelFacts:
    """Read the kernel log of this boot; `indexes` maps bus ids of NVML to GPU indexes."""
    lines = kernel_lines(root)
    foreign = -1  # a GPU that this container was not given
    if lines is None:
        return KernelFacts(log="unavailable")
    places = {short_bus(bus_id): index for bus_id, index in indexes.items()}
    above = {
        short_bus(step.name)
        for bus_id in indexes
        for step in ports_above(root / "sys/bus/pci/devices" / sysfs_name(bus_id))
    }
    errors = [error for error in aer_errors(lines) if error.bus in places or error.bus in above]
    return KernelFacts(
        log="read",
        xids=tuple(
            XidFacts(line.xid, places.get(line.bus, foreign), line.count) for line in xids(lines)
        ),
        aer_fatal=tuple(f"{error.kind} at {error.bus}" for error in errors if not error.corrected),
        aer_corrected=tuple(f"{error.kind} at {error.bus}" for error in errors if error.corrected),
    )


def kernel_lines(root: Path = ROOT) -> list[str] | None:
    """Return this boot's kernel log, from the device or a mounted log file; None without."""
    for name in ("dev/kmsg", "var/log/kern.log", "var/log/messages"):
        text = _log_text(root / name)
        if text is not None:
            return this_boot(text.splitlines())
    return None


def _log_text(path: Path) -> str | None:
    """Read a log without waiting: /dev/kmsg gives one record a read and EAGAIN at its end."""
    parts: list[bytes] = []
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        while sum(map(len, parts)) < _LOG_BYTES and (part := _record(descriptor)):
            parts.append(part)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return b"".join(parts).decode(errors="replace")


def _record(descriptor: int) -> bytes:
    while True:
        try:
            return os.read(descriptor, 65_536)
        except BrokenPipeError:
            continue  # records were overwritten since the last read; the next one goes on behind
        except BlockingIOError:
            return b""


def _text(path: Path, otherwise: str | None = None) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return otherwise or ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _total(path: Path) -> int | None:
    """Sum an AER file, which ends in a line `TOTAL_ERR_COR 3`."""
    found = re.search(r"^TOTAL_\w+ (\d+)", _text(path), re.MULTILINE)
    return None if found is None else int(found[1])


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def shadowing_libcuda(driver_version: str | None, root: Path = ROOT) -> str | None:
    """Return a libcuda of another version that the loader finds before the driver's own.

    The loader's order is LD_LIBRARY_PATH, then the folders of ld.so.conf.d in their order; an
    image's
    cuda-compat folder in either hides the library that the container engine mounts.
    """
    if driver_version is None:
        return None
    for folder in (*_library_path(), *_configured_folders(root)):
        path = root / folder.lstrip("/") / "libcuda.so.1"
        try:
            version = re.search(r"libcuda\.so\.(\d+\.\d+[\d.]*)", path.resolve(strict=True).name)
        except OSError:
            continue
        return None if version is None or version[1] == driver_version else f"{folder}/{version[0]}"
    return None


def _library_path() -> list[str]:
    return [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]


def _configured_folders(root: Path) -> list[str]:
    files = sorted((root / "etc/ld.so.conf.d").glob("*.conf"))
    lines = [line.strip() for path in files for line in _text(path).splitlines()]
    return [line for line in lines if line.startswith("/")]
