"""Does the engine make progress? Judged by its counters and by one-token requests; pure, no clock.

Rules: a counter that moved is progress, whatever else is slow, so a busy engine never fails. An
idle engine is asked for one token now and then. What was asked and has not been answered while no
counter moved is waited for; after half of `runtime.stall` the appliance is not ready, after all of
it the engine counts as stalled. An engine whose port is closed is gone, not slow.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

UNREACHABLE_GRACE_S = 10.0
"""The API server closes its port some seconds before its process ends; its end tells more."""

_COUNTERS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_count",
)
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_LINE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{[^}]*\})? (?P<value>\S+)")


@dataclass(frozen=True)
class EngineSample:
    """The engine's own counters at one moment; `work` grows with every step of the engine."""

    work: float
    requests: float


class Health(StrEnum):
    """What the watch says of the engine."""

    MOVING = "moving"
    SUSPECT = "suspect"
    STALLED = "stalled"
    GONE = "gone"


@dataclass(frozen=True)
class WatchStatus:
    """The watch's last word, for probes and metrics."""

    health: Health = Health.MOVING
    waited_s: float = 0.0
    detail: str = ""
    engine_metrics: str = ""
    scraped_at: float | None = None


def parse_metrics(text: str) -> EngineSample:
    """Sum the engine's counters over all its labels; 0.0 where a metric is absent."""
    work = requests = 0.0
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        match = _LINE.match(line)
        value = None if match is None else _number(match["value"])
        if match is None or value is None:
            continue
        if match["name"] in _COUNTERS:
            work += value
        elif match["name"] in _GAUGES:
            requests += value
    return EngineSample(work, requests)


def _number(text: str) -> float | None:
    """Return a finite number; NaN would look like a counter that moves for ever."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class Progress:
    """Follows one engine from the moment it became ready; times in seconds, monotonic."""

    def __init__(self, stall_s: float, now: float) -> None:
        """Start as moving."""
        self._stall_s = stall_s
        self._work: float | None = None
        self._moved_at = now
        self._waiting_since: float | None = None
        self._asked = False
        self._unanswered = False
        self._unreachable_since: float | None = None
        self._silent = False

    def scraped(self, sample: EngineSample, *, in_flight: int, now: float) -> None:
        """Take the counters; `in_flight` is what the gateway has let in."""
        self._unreachable_since = None
        self._silent = False
        if self._work is not None and sample.work != self._work:
            self._moved(now)
        self._work = sample.work
        asked = self._asked or self._unanswered
        self._wait(now, outstanding=in_flight > 0 or sample.requests > 0 or asked)

    def scrape_failed(self, *, reachable: bool, now: float) -> None:
        """Note that the counters could not be read."""
        self._silent = reachable
        if not reachable and self._unreachable_since is None:
            self._unreachable_since = now
        self._wait(now, outstanding=True)

    def canary_due(self, now: float) -> bool:
        """Tell whether the engine should be asked for one token."""
        return not self._asked and now - self._moved_at >= self._stall_s / 4

    def canary_sent(self, now: float) -> None:
        """Note that one token was asked for."""
        self._asked = True
        self._wait(now, outstanding=True)

    def canary_done(self, *, answered: bool, now: float) -> None:
        """Note what came of it; a question without an answer stays open until a counter moves."""
        self._asked = False
        if answered:
            self._moved(now)
        else:
            self._unanswered = True
            self._wait(now, outstanding=True)

    def health(self, now: float) -> tuple[Health, float, str]:
        """Return the verdict, the seconds waited, and what is waited for."""
        if self._unreachable_since is not None:
            away = now - self._unreachable_since
            health = Health.GONE if away >= UNREACHABLE_GRACE_S else Health.SUSPECT
            return health, away, "the engine's port is closed"
        if self._waiting_since is None:
            return Health.MOVING, 0.0, ""
        waited = now - self._waiting_since
        detail = "no answer to anything" if self._silent else "work is pending and no counter moves"
        if waited >= self._stall_s:
            return Health.STALLED, waited, detail
        if waited >= self._stall_s / 2:
            return Health.SUSPECT, waited, detail
        return Health.MOVING, waited, detail

    def _moved(self, now: float) -> None:
        self._moved_at = now
        self._waiting_since = None
        self._unanswered = False

    def _wait(self, now: float, *, outstanding: bool) -> None:
        if outstanding and self._waiting_since is None:
            self._waiting_since = now
        elif not outstanding:
            self._waiting_since = None
