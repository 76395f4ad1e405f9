"""Turns single samples into a steady verdict: what enters, what leaves, what stays. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from healthchecks.result import CheckResult, Severity, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from healthchecks.facts import HostFacts

DOWN_AFTER, UP_AFTER = 2, 3
"""Bad samples in a row that end readiness, good ones in a row that bring it back."""

SLOW_SAMPLES, SLOW_WINDOW = 6, 10
QUIET_S = 300.0
"""Slowdown refuses at 6 of 10 samples and is over after five minutes without one."""

SENSOR_ERRORS = 3
_SLOWDOWN, _CORE, _MEMORY, _SENSOR = "thermal.slowdown", "thermal.gpu", "thermal.hbm", "power.read"
_STAYS = ("ecc.dbe.volatile", "gpu.present", "xid.48", "xid.62", "xid.64", "xid.79")


@dataclass
class _Track:
    """One check on one GPU over time."""

    recent: deque[bool] = field(default_factory=lambda: deque[bool](maxlen=SLOW_WINDOW))
    active: bool = False
    last_bad_s: float = 0.0
    in_a_row: int = 0
    kept: CheckResult | None = None


@dataclass(frozen=True)
class Leave:
    """Where a warm GPU counts as cool again, in degrees Celsius."""

    gpu_c: int = 80
    hbm_margin_c: int = 10


class Hysteresis:
    """Remembers the samples of one run."""

    def __init__(self, leave: Leave) -> None:
        """Start without any sample."""
        self._leave = leave
        self._tracks: dict[tuple[str, str], _Track] = {}
        self._bad = 0
        self._good = 0
        self.ready = True  # the start gate vouches for the time before the first sample

    def settle(
        self, results: Sequence[CheckResult], facts: HostFacts, now_s: float
    ) -> tuple[CheckResult, ...]:
        """Return the results as they count: brief heat softens, faults stay."""
        settled = [self._one(result, facts, now_s) for result in results]
        shown = {(result.id, result.scope) for result in settled if result.status is Status.FAIL}
        kept = [
            track.kept
            for key, track in self._tracks.items()
            if track.kept is not None and key not in shown
        ]
        final = (*settled, *kept)
        self._count(final)
        return final

    def _one(self, result: CheckResult, facts: HostFacts, now_s: float) -> CheckResult:
        track = self._tracks.setdefault((result.id, result.scope), _Track())
        bad = result.status in (Status.WARN, Status.FAIL)
        if result.id == _SLOWDOWN:
            return self._slowdown(result, track, now_s, bad=bad)
        if result.id in (_CORE, _MEMORY):
            return self._warm(result, track, facts, bad=bad)
        if result.id == _SENSOR:
            track.in_a_row = track.in_a_row + 1 if bad else 0
            return result if track.in_a_row >= SENSOR_ERRORS else _softened(result, Status.PASS)
        if result.id in _STAYS and result.status is Status.FAIL:
            track.kept = replace(result, message=f"{result.message} (latched)")
        return result

    def _slowdown(
        self, result: CheckResult, track: _Track, now_s: float, *, bad: bool
    ) -> CheckResult:
        track.recent.append(bad)
        if bad:
            track.last_bad_s = now_s
        if sum(track.recent) >= SLOW_SAMPLES:
            track.active = True
            track.kept = result if bad else track.kept
        elif track.active and now_s - track.last_bad_s >= QUIET_S:
            track.active, track.kept = False, None
        if track.active and track.kept is not None:
            return track.kept
        return _softened(result, Status.WARN) if bad else result

    def _warm(
        self, result: CheckResult, track: _Track, facts: HostFacts, *, bad: bool
    ) -> CheckResult:
        track.active = bad or (track.active and not self._cool(result, facts))
        if bad or not track.active:
            return result
        return replace(
            result, status=Status.WARN, message=f"{result.message}, not cool enough to call it over"
        )

    def _cool(self, result: CheckResult, facts: HostFacts) -> bool:
        gpu = next((gpu for gpu in facts.gpus if result.scope == f"gpu:{gpu.uuid}"), None)
        if gpu is None:
            return False
        thermal = gpu.thermal
        if result.id == _CORE:
            return thermal.gpu_c is not None and thermal.gpu_c <= self._leave.gpu_c
        if thermal.hbm_c is None or thermal.hbm_max_c is None:
            return False
        return thermal.hbm_max_c - thermal.hbm_c >= self._leave.hbm_margin_c

    def _count(self, results: Sequence[CheckResult]) -> None:
        bad = any(_refuses(result) for result in results)
        self._bad, self._good = (self._bad + 1, 0) if bad else (0, self._good + 1)
        if self._bad >= DOWN_AFTER:
            self.ready = False
        elif self._good >= UP_AFTER:
            self.ready = True


def _softened(result: CheckResult, status: Status) -> CheckResult:
    return replace(result, status=status) if result.status in (Status.WARN, Status.FAIL) else result


def _refuses(result: CheckResult) -> bool:
    if result.status is Status.FAIL:
        return True
    return result.status is Status.UNKNOWN and (result.severity is Severity.HARD or result.fixed)
