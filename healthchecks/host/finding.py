"""What the host check says: a code, a status, what was seen, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from healthchecks.result import Status


@dataclass(frozen=True)
class Finding:
    """One statement about the host; `code` is stable and in capitals."""

    code: str
    status: Status
    seen: str
    remedy: str = ""

    def line(self) -> str:
        """Return `FAIL CODE what was seen; what to do`."""
        fix = f"; {self.remedy}" if self.remedy else ""
        return f"{self.status.value.upper():<8} {self.code:<20} {self.seen}{fix}"


def passed(code: str, seen: str) -> Finding:
    """Return a finding without fault."""
    return Finding(code, Status.PASS, seen)
