"""NVLink: dead lanes, lanes lost since an earlier run, and lane errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import HARD, INFO, SOFT
from healthchecks.policy import NVLINK_CRC_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.context import Context
    from healthchecks.facts import GpuFacts, PairFacts
    from healthchecks.result import CheckResult, Severity

_REMEDY = "reboot; if the lanes stay dead, reseat the boards or their bridge"


def check(context: Context) -> Iterator[CheckResult]:
    """Judge the lanes of every pair and their error counters."""
    for pair in context.pairs:
        yield _lanes(context, pair)
    for gpu in context.gpus if context.parallel else ():
        yield from _errors(context, gpu)


def _severity(context: Context) -> Severity:
    """Dead lanes cost speed, not answers: a pair that may go through host memory only warns."""
    return context.p2p_severity() if context.tensor else INFO


def _lanes(context: Context, pair: PairFacts) -> CheckResult:
    first, second = context.by_index(pair.a), context.by_index(pair.b)
    subject = context.on_pair("pair.nvlink", pair, _severity(context))
    wanted = "every lane active"
    if not first.links and not second.links:
        if pair.nvlink_lanes:
            return subject.passes(f"{pair.nvlink_lanes} lanes", wanted)
        return subject.skipped("the boards show no NVLink")
    known = context.remembered(first)
    best = 0 if known is None else known.best_links.get(second.uuid or "", 0)
    if not best and not any(lane.active for gpu in (first, second) for lane in gpu.links or ()):
        return subject.skipped("no lane is wired; the boards sit on PCIe carriers")
    dead = [
        f"GPU {gpu.index} lane {lane.link}"
        for gpu in (first, second)
        for lane in gpu.links or ()
        if not lane.active
    ]
    if dead:
        observed = ", ".join(dead)
        return subject.fails(
            observed,
            wanted,
            f"dead NVLink lanes: {observed}",
            remedy=_REMEDY,
            scope="hardware_service",
            value=len(dead),
        )
    lanes = pair.nvlink_lanes
    if lanes is not None and lanes < best:
        return subject.fails(
            f"{lanes} lanes",
            f"{best} lanes, as seen before",
            f"{lanes} of {best} NVLink lanes between the two",
            remedy=_REMEDY,
            scope="hardware_service",
            value=best - lanes,
        )
    return subject.passes("all active" if lanes is None else f"{lanes} lanes", wanted)


def _errors(context: Context, gpu: GpuFacts) -> Iterator[CheckResult]:
    lanes = [lane for lane in gpu.links or () if lane.active]
    if not lanes:
        return
    storm = max((lane.crc_per_s or 0.0 for lane in lanes), default=0.0)
    hard = context.tensor and storm >= NVLINK_CRC_PER_S and _on_path(context, gpu)
    subject = context.on_gpu("nvlink.errors", gpu, HARD if hard else SOFT)
    crc = sum(lane.crc_errors or 0 for lane in lanes)
    again = sum((lane.replays or 0) + (lane.recoveries or 0) for lane in lanes)
    observed = f"{crc} CRC errors, {again} replays and recoveries since driver load"
    if storm >= NVLINK_CRC_PER_S:
        observed = f"{storm:.0f} CRC errors a second; {observed}"
    if crc or again:
        yield subject.fails(
            observed,
            f"none, refused at {NVLINK_CRC_PER_S:g} CRC errors a second",
            observed,
            remedy="reseat the boards or their bridge when it grows",
            scope="hardware_service",
            value=storm or crc + again,
        )
    else:
        yield subject.passes("0", "none")


def _on_path(context: Context, gpu: GpuFacts) -> bool:
    return any(pair.nvlink_lanes for pair in context.pairs if gpu.index in (pair.a, pair.b))
