"""Rates of counters between looks at the same machine. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from healthchecks.facts import GpuFacts, HostFacts, LinkFacts

REPLAY_WINDOW_S = 300.0
"""Span over which replays are counted; a burst within a minute says little."""

_MIN_SPAN_S = 60.0


@dataclass
class Rates:
    """Keeps the looks of the last minutes."""

    looks: deque[tuple[float, HostFacts]] = field(default_factory=deque)

    def add(self, facts: HostFacts, now_s: float) -> HostFacts:
        """Return the facts with the rates since earlier looks; the first look has none."""
        while self.looks and now_s - self.looks[0][0] > REPLAY_WINDOW_S:
            self.looks.popleft()
        oldest = self.looks[0] if self.looks else None
        latest = self.looks[-1] if self.looks else None
        self.looks.append((now_s, facts))
        gpus = tuple(_with_replays(gpu, oldest, now_s) for gpu in facts.gpus)
        return replace(facts, gpus=tuple(_with_crc(gpu, latest, now_s) for gpu in gpus))


def _with_replays(gpu: GpuFacts, look: tuple[float, HostFacts] | None, now_s: float) -> GpuFacts:
    before = _same(gpu, look)
    if look is None or before is None or now_s - look[0] < _MIN_SPAN_S:
        return gpu
    start, end = before.pcie.replays, gpu.pcie.replays
    if start is None or end is None or end < start:
        return gpu
    rate = (end - start) * 60 / (now_s - look[0])
    return replace(gpu, pcie=replace(gpu.pcie, replays_per_min=rate))


def _with_crc(gpu: GpuFacts, look: tuple[float, HostFacts] | None, now_s: float) -> GpuFacts:
    before = _same(gpu, look)
    if look is None or before is None or gpu.links is None or now_s <= look[0]:
        return gpu
    known = {lane.link: lane for lane in before.links or ()}
    span_s = now_s - look[0]
    return replace(
        gpu, links=tuple(_lane(lane, known.get(lane.link), span_s) for lane in gpu.links)
    )


def _lane(lane: LinkFacts, before: LinkFacts | None, span_s: float) -> LinkFacts:
    if before is None or before.crc_errors is None or lane.crc_errors is None:
        return lane
    return replace(lane, crc_per_s=max(0, lane.crc_errors - before.crc_errors) / span_s)


def _same(gpu: GpuFacts, look: tuple[float, HostFacts] | None) -> GpuFacts | None:
    if look is None:
        return None
    return next((other for other in look[1].gpus if other.uuid == gpu.uuid), None)
