"""Device nodes, hung processes, memory and disk of the host."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

from healthchecks.host.finding import Finding, passed
from healthchecks.result import Status
from healthchecks.sysfs import host_memory, uvm_node

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from healthchecks.facts import HostFacts

_GIB = 1024**3
_UNINTERRUPTIBLE = "D"
_DRIVER_USERS = re.compile(r"nvidia|vllm|python|cuda|dcgm")


def device_findings(root: Path) -> Iterator[Finding]:
    """Judge the nodes that CUDA needs beside those of NVML."""
    if uvm_node(root):
        yield passed("UVM", "/dev/nvidia-uvm")
    else:
        seen = "/dev/nvidia-uvm is absent: nvidia-smi works and CUDA does not"
        yield Finding(
            "UVM_MISSING", Status.FAIL, seen, "modprobe nvidia-uvm && nvidia-modprobe -u -c=0"
        )


def persistence_findings(facts: HostFacts | None) -> Iterator[Finding]:
    """Judge persistence mode of every GPU that NVML lists."""
    off = [gpu.index for gpu in (facts.gpus if facts else ()) if gpu.persistence is False]
    if off:
        seen = f"persistence is off on GPU {', '.join(map(str, off))}"
        yield Finding(
            "PERSISTENCE_OFF", Status.WARN, seen, "systemctl enable --now nvidia-persistenced"
        )


def hung_findings(root: Path) -> Iterator[Finding]:
    """Judge processes in uninterruptible sleep that hold a GPU; nothing here waits for them."""
    pids = hung_pids(root)
    if pids:
        seen = f"pid={','.join(map(str, pids))} hangs in the driver"
        yield Finding(
            "D_STATE", Status.FAIL, seen, "reboot the host; a container with it cannot be stopped"
        )


def hung_pids(root: Path) -> list[int]:
    """Return processes in state D that have a GPU open, or by name may have."""
    found: list[int] = []
    for entry in (root / "proc").glob("[0-9]*"):
        stat = _read(entry / "stat")
        name, _, rest = stat.rpartition(")")
        if rest.strip()[:1] == _UNINTERRUPTIBLE and _uses_gpu(entry, name):
            found.append(int(entry.name))
    return sorted(found)


def _uses_gpu(entry: Path, name: str) -> bool:
    try:
        return any("/dev/nvidia" in str(link.readlink()) for link in (entry / "fd").iterdir())
    except OSError:
        return bool(_DRIVER_USERS.search(name))


def memory_findings(root: Path, needed_bytes: int) -> Iterator[Finding]:
    """Judge available host memory."""
    have = host_memory(root).available
    if have is None:
        yield Finding("RAM_UNREAD", Status.UNKNOWN, "/proc/meminfo is not readable")
    elif have < needed_bytes:
        seen = f"{have / _GIB:.1f} GiB available, {needed_bytes / _GIB:.1f} GiB needed"
        yield Finding("HOST_RAM", Status.FAIL, seen, "free memory or choose a smaller checkpoint")
    else:
        yield passed("HOST_RAM", f"{have / _GIB:.1f} GiB available")


def disk_findings(folder: Path, needed_bytes: int) -> Iterator[Finding]:
    """Judge free disk where images and checkpoints go."""
    try:
        have = shutil.disk_usage(folder).free
    except OSError as error:
        yield Finding("DISK_UNREAD", Status.UNKNOWN, f"{folder}: {error.strerror}")
        return
    seen = f"{folder}: {have / _GIB:.1f} GiB free"
    if have < needed_bytes:
        yield Finding(
            "DISK_FULL",
            Status.FAIL,
            f"{seen}, {needed_bytes / _GIB:.1f} GiB needed",
            "free disk space",
        )
    else:
        yield passed("DISK", seen)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
