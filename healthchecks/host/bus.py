"""The PCIe bus between the GPUs: redirected peer traffic and link power saving."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from healthchecks.host.finding import Finding, passed
from healthchecks.result import Status
from healthchecks.sysfs import ports_above

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_HEADER_BYTES = 256
_ACS_CAPABILITY, _PCIE_CAPABILITY = 0x000D, 0x10
_ACS_CONTROL_OFFSET, _LINK_CONTROL_OFFSET = 6, 0x10
_REQUEST_REDIRECT, _COMPLETION_REDIRECT = 0x04, 0x08
_ASPM_BITS = 0x03
_MAX_CAPABILITIES = 64


@dataclass(frozen=True)
class Port:
    """What a bridge's configuration space says; None where it could not be read (it takes root)."""

    name: str
    redirects: bool | None
    aspm: bool | None


def port_of(device: Path) -> Port:
    """Read one device's configuration space."""
    try:
        config = (device / "config").read_bytes()
    except OSError:
        config = b""
    return Port(device.name, redirects_peers(config), saves_power(config))


def redirects_peers(config: bytes) -> bool | None:
    """Tell whether ACS sends peer traffic upwards, where an IOMMU may drop it (PCIe 7.7.8)."""
    if len(config) <= _HEADER_BYTES:
        return None
    at = _HEADER_BYTES
    for _ in range(_MAX_CAPABILITIES):
        if at < _HEADER_BYTES or at + 8 > len(config):
            return False
        (head,) = struct.unpack_from("<I", config, at)
        if head & 0xFFFF == _ACS_CAPABILITY:
            (control,) = struct.unpack_from("<H", config, at + _ACS_CONTROL_OFFSET)
            return bool(control & (_REQUEST_REDIRECT | _COMPLETION_REDIRECT))
        at = head >> 20
    return False


def saves_power(config: bytes) -> bool | None:
    """Tell whether the link may go to sleep (ASPM bits of link control, PCIe 7.5.3)."""
    if len(config) < _HEADER_BYTES:
        return None
    at = config[0x34]
    for _ in range(_MAX_CAPABILITIES):
        if at < 0x40 or at + _LINK_CONTROL_OFFSET + 2 > len(config):  # noqa: PLR2004 - end of the header
            return False
        if config[at] == _PCIE_CAPABILITY:
            (control,) = struct.unpack_from("<H", config, at + _LINK_CONTROL_OFFSET)
            return bool(control & _ASPM_BITS)
        at = config[at + 1]
    return False


def bus_findings(root: Path) -> Iterator[Finding]:
    """Judge the bridges above every NVIDIA GPU."""
    gpus = [device for device in _devices(root) if _is_gpu(device)]
    ports = {step.name: port_of(step) for gpu in gpus for step in ports_above(gpu)}
    yield from _acs(list(ports.values()), _text(root / "proc/cmdline"))
    yield from _aspm([*ports.values(), *(port_of(gpu) for gpu in gpus)], root)


def _acs(ports: list[Port], cmdline: str) -> Iterator[Finding]:
    redirecting = [port.name for port in ports if port.redirects]
    if redirecting:
        yield Finding(
            "ACS_ON_PATH",
            Status.WARN,
            f"ACS redirects peer traffic at {', '.join(redirecting)}{_iommu(cmdline)}",
            "turn ACS off in the firmware setup, or boot with pcie_acs_override or "
            "iommu=pt, or setpci the"
            " bridges (lost at reboot); gate.p2p.policy: auto starts without P2P",
        )
    elif any(port.redirects is None for port in ports):
        seen = "the bridges' configuration is not readable"
        yield Finding("ACS_UNREAD", Status.UNKNOWN, seen, "run the host check as root")
    elif ports:
        yield passed("ACS", f"{len(ports)} bridges, none redirects")


def _iommu(cmdline: str) -> str:
    if re.search(r"\b(iommu=pt|intel_iommu=off|amd_iommu=off|iommu=off)\b", cmdline):
        return ", IOMMU translation is off"
    return ", IOMMU translation may be on"


def _aspm(ports: list[Port], root: Path) -> Iterator[Finding]:
    policy = re.search(r"\[(\w+)\]", _text(root / "sys/module/pcie_aspm/parameters/policy"))
    sleepy = [port.name for port in ports if port.aspm]
    if sleepy and (policy is None or policy[1] != "performance"):
        yield Finding(
            "ASPM_ON",
            Status.WARN,
            f"links may sleep at {', '.join(sleepy)}",
            "boot with pcie_aspm.policy=performance",
        )


def _devices(root: Path) -> list[Path]:
    folder = root / "sys/bus/pci/devices"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_gpu(device: Path) -> bool:
    return _text(device / "vendor") == "0x10de" and _text(device / "class").startswith(
        ("0x0300", "0x0302")
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
