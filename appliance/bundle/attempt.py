"""Tries to get a part of the bundle: a value, or the reason why there is none, and in time."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from appliance.errors import ApplianceError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

LIMIT_S = 60.0
"""One part may take this long: a lost GPU or a network drive that is gone must not stop it all."""

_LONGEST_REASON = 8192


@dataclass(frozen=True)
class Got(Generic[T]):
    """A part that could be had."""

    value: T


@dataclass(frozen=True)
class Missed:
    """A part that could not be had."""

    reason: str
    error: Exception | None = None


def attempt(make: Callable[[], T]) -> Got[T] | Missed:
    """Make a part; whatever it raises becomes the reason."""
    try:
        return Got(make())
    except Exception as error:  # noqa: BLE001 - one part that fails must not cost the others
        return Missed(reason_of(error), error)


def attempt_in_time(make: Callable[[], T], limit_s: float = LIMIT_S) -> Got[T] | Missed:
    """Make a part on a thread that is left behind when it does not end."""
    ended: list[Got[T] | Missed] = []
    worker = threading.Thread(
        target=lambda: ended.append(attempt(make)), name="bundle", daemon=True
    )
    worker.start()
    worker.join(limit_s)
    return ended[0] if ended else Missed(f"not ready within {limit_s:g} s")


def reason_of(error: Exception) -> str:
    """Return what an error says, in one text."""
    if isinstance(error, ApplianceError):
        text = " ".join(map(str, error.faults))
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename or ''}: {error.strerror}".removeprefix(": ")
    else:
        text = f"{type(error).__name__}: {error}"
    return text[:_LONGEST_REASON]
