"""GPU and PCIe errors in kernel log lines: pure text in, events out."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# With and without process, with 4 or 8 digits of domain, with and without function:
#   NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
#   NVRM: Xid (PCI:00000000:3B:00.0): 13, Graphics SM Warp Exception
#   NVRM: Xid (0000:3b:00): 31, Ch 00000010
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<bus>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})(?:\.[0-9a-f])?\): "
    r"(?P<xid>\d+)\b",
    re.IGNORECASE,
)
# pcieport 0000:3a:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Data Link Layer, ...
# severity=Corrected errors are counted apart; the kind is on the same line after type=.
_AER = re.compile(
    r"(?P<bus>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]): (?:AER: )?PCIe Bus Error: "
    r"severity=(?P<severity>[^,]+), type=(?P<kind>[^,]+)",
    re.IGNORECASE,
)
_BOOT = re.compile(r"Linux version \d")


@dataclass(frozen=True)
class XidLine:
    """One Xid number on one bus id, with how often it was logged."""

    bus: str
    xid: int
    count: int


@dataclass(frozen=True)
class AerLine:
    """One PCIe bus error: device, severity, kind."""

    bus: str
    severity: str
    kind: str

    @property
    def corrected(self) -> bool:
        """Whether the link repaired it by itself."""
        return self.severity.lower().startswith("corrected")


def this_boot(lines: Iterable[str]) -> list[str]:
    """Return the lines since the last boot; a log file on disk holds earlier boots too."""
    kept: list[str] = []
    for line in lines:
        if _BOOT.search(line):
            kept.clear()
        kept.append(line)
    return kept


def xids(lines: Iterable[str]) -> tuple[XidLine, ...]:
    """Return every Xid number by bus id; numbers unknown here are kept."""
    found = Counter(
        (short_bus(match["bus"]), int(match["xid"]))
        for line in lines
        if (match := _XID.search(line))
    )
    return tuple(XidLine(bus, xid, count) for (bus, xid), count in sorted(found.items()))


def aer_errors(lines: Iterable[str]) -> tuple[AerLine, ...]:
    """Return every PCIe bus error once."""
    found = {
        AerLine(short_bus(match["bus"]), match["severity"].strip(), match["kind"].strip())
        for line in lines
        if (match := _AER.search(line))
    }
    return tuple(sorted(found, key=lambda line: (line.bus, line.severity, line.kind)))


def short_bus(bus_id: str) -> str:
    """Return `3b:00` of any spelling of a bus id in domain 0, `1:3b:00` in another domain."""
    domain, bus, device = bus_id.lower().split(":")
    device = device.partition(".")[0]
    number = int(domain, 16)
    return f"{bus}:{device}" if number == 0 else f"{number:x}:{bus}:{device}"
