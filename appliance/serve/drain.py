"""When is a drain over, and how long may the engine then end? Pure, monotonic, in seconds."""

from __future__ import annotations

from enum import Enum, auto

TERMINATE_S = 20.0
"""The engine gets this long to end after it has been asked to; then it is killed."""

GIVEN_UP_S = 3.0
"""The same with requests in flight that are given up: the engine would wait for them."""


def terminate_s(in_flight: int) -> float:
    """Return how long the engine may take to end once it has been asked to."""
    return GIVEN_UP_S if in_flight > 0 else TERMINATE_S


class DrainOutcome(Enum):
    """What a reading of the requests in flight means."""

    WAITING = auto()
    DRAINED = auto()
    TIMED_OUT = auto()


class Drain:
    """One drain: over when two readings in a row find nothing in flight, or when its time is up.

    Two, because a request may be let in by the gateway in the very moment the drain begins; it is
    counted before the gateway looks whether it drains.
    """

    def __init__(self, *, timeout_s: float, now: float) -> None:
        """Begin."""
        self._deadline = now + timeout_s
        self._empty_before = False

    def observe(self, in_flight: int, now: float) -> DrainOutcome:
        """Judge one reading."""
        if in_flight == 0 and self._empty_before:
            return DrainOutcome.DRAINED
        self._empty_before = in_flight == 0
        if now >= self._deadline and in_flight > 0:
            return DrainOutcome.TIMED_OUT
        return DrainOutcome.WAITING
