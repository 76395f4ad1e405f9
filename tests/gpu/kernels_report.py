"""What a section of the device checks found, as plain data."""

from __future__ import annotations

import contextlib
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_FAILURES = 20


@dataclass
class Report:
    """Counts checks, keeps the first failures, and carries figures for the JSON file."""

    section: str
    deadline: float = float("inf")  # time.monotonic()
    checks: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def case(self, where: str) -> Iterator[None]:
        """Count one check; an exception in it is a failure, and the section goes on."""
        self.checks += 1
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the report is the product
            self.fail(f"{where}: {_words(error)}")

    def fail(self, sentence: str) -> None:
        self.failed += 1
        if len(self.failures) < MOST_FAILURES:
            self.failures.append(sentence)

    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def as_dict(self) -> dict[str, Any]:
        return {
            "section": self.section,
            "ok": self.failed == 0,
            "checks": self.checks,
            "failed": self.failed,
            "failures": self.failures,
            "details": self.details,
        }


def _words(error: Exception) -> str:
    if isinstance(error, AssertionError) and str(error):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {where}: {str(error).splitlines()[0] if str(error) else ''}"
