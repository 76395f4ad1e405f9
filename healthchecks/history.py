"""How the memory of the machine moves on: what a run adds, what a boot or an ack takes away."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from healthchecks.state import Ack, GpuState, Latch, State, XidSeen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from healthchecks.facts import GpuFacts, HostFacts

T = TypeVar("T")

MAX_XIDS = 200
"""Xids kept for one GPU (the state file's schema)."""

MAX_HISTORY = 64
REPEAT_DAYS = 30
"""Two losses of the bus within this many days stay until someone acknowledges them."""

OFF_THE_BUS = 79
DBE, LOST = "ecc.dbe.volatile", "gpu.present"
_BOOT, _RELOAD, _ACK = "boot", "driver_reload", "ack"
LATCHING_XIDS = {48: _RELOAD, 62: _BOOT, 64: _ACK, OFF_THE_BUS: _BOOT}


class AckError(ValueError):
    """There is nothing to acknowledge under that name."""


def refresh(state: State, facts: HostFacts) -> State:
    """Drop the latches that a boot or a driver reload has cleared."""
    seen = {gpu.uuid: gpu for gpu in facts.gpus}
    gpus = {
        uuid: replace(
            known,
            latched=tuple(
                latch for latch in known.latched if _holds(latch, seen.get(uuid), facts.boot_id)
            ),
        )
        for uuid, known in state.gpus.items()
    }
    return replace(state, gpus=gpus)


def _holds(latch: Latch, gpu: GpuFacts | None, boot_id: str | None) -> bool:
    if latch.clears_on == _ACK:
        return True
    if boot_id is not None and boot_id != latch.boot_id:
        return False
    # The driver was loaded anew when its counters dropped and no page waits any more.
    reloaded = gpu is not None and gpu.ecc.volatile_dbe == 0 and gpu.retired.pending is False
    return not (latch.clears_on == _RELOAD and reloaded)


def advance(state: State, facts: HostFacts, now: datetime) -> State:
    """Return the state after a run; GPUs that were not seen keep theirs."""
    at = now.isoformat(timespec="seconds")
    gpus = dict(state.gpus)
    for gpu in facts.gpus:
        if gpu.uuid is not None:
            known = gpus.get(gpu.uuid) or GpuState(first_seen=at, last_seen=at)
            gpus[gpu.uuid] = _moved_on(known, gpu, facts, at)
    return State(
        written_at=at, boot_id=facts.boot_id, driver_version=facts.driver_version, gpus=gpus
    )


def _moved_on(known: GpuState, gpu: GpuFacts, facts: HostFacts, at: str) -> GpuState:
    ecc, retired, pcie = gpu.ecc, gpu.retired, gpu.pcie
    pending_since = (known.pending_since or at) if retired.pending else None
    xids = _xids(known.xids, gpu, facts, at)
    moved = replace(
        known,
        last_seen=at,
        serial=gpu.serial or known.serial,
        bus_id=gpu.bus_id or known.bus_id,
        name=gpu.name or known.name,
        aggregate_sbe=_known(ecc.aggregate_sbe, known.aggregate_sbe),
        aggregate_dbe=_known(ecc.aggregate_dbe, known.aggregate_dbe),
        peak_sbe=_highest(ecc.aggregate_sbe, known.peak_sbe),
        peak_dbe=_highest(ecc.aggregate_dbe, known.peak_dbe),
        baseline_dbe=_baseline(ecc.aggregate_dbe, known.baseline_dbe),
        volatile_dbe=_known(ecc.volatile_dbe, known.volatile_dbe),
        retired_sbe=_known(retired.sbe, known.retired_sbe),
        retired_dbe=_known(retired.dbe, known.retired_dbe),
        pending=_known(retired.pending, known.pending),
        pending_since=known.pending_since if retired.pending is None else pending_since,
        dbe_history=_history(known, retired.dbe, at),
        replay=_known(pcie.replays, known.replay),
        aer_fatal=_known(pcie.aer_fatal, known.aer_fatal),
        best_width=_highest(_highest(pcie.width, pcie.loaded_width), known.best_width),
        best_generation=_highest(
            _highest(pcie.generation, pcie.loaded_generation), known.best_generation
        ),
        best_links=_links(known, gpu, facts),
        xids=xids,
    )
    return replace(moved, latched=_latches(moved, gpu, facts, at))


def _known(value: T | None, before: T | None) -> T | None:
    return before if value is None else value


def _highest(value: int | None, before: int | None) -> int | None:
    return max((item for item in (value, before) if item is not None), default=None)


def _baseline(count: int | None, baseline: int | None) -> int | None:
    """The first count seen, lowered when someone clears the counter; only an ack raises it."""
    if count is None or baseline is None:
        return _known(baseline, count)
    return min(count, baseline)


def _history(known: GpuState, pages: int | None, at: str) -> tuple[tuple[str, int], ...]:
    if pages is None or (known.dbe_history and known.dbe_history[-1][1] == pages):
        return known.dbe_history
    return (*known.dbe_history, (at, pages))[-MAX_HISTORY:]


def _links(known: GpuState, gpu: GpuFacts, facts: HostFacts) -> dict[str, int]:
    names = {other.index: other.uuid for other in facts.gpus}
    best = dict(known.best_links)
    for pair in facts.pairs:
        peer = {pair.a: pair.b, pair.b: pair.a}.get(gpu.index)
        uuid = None if peer is None else names.get(peer)
        if uuid and pair.nvlink_lanes:
            best[uuid] = max(best.get(uuid, 0), pair.nvlink_lanes)
    return best


def _xids(
    before: tuple[XidSeen, ...], gpu: GpuFacts, facts: HostFacts, at: str
) -> tuple[XidSeen, ...]:
    """Add each number once a boot; the log holds it as long as the boot lasts."""
    logged = {(seen.xid, seen.boot_id) for seen in before}
    fresh = [
        XidSeen(event.xid, at, facts.boot_id, event.source)
        for event in facts.kernel.xids
        if event.gpu == gpu.index and (event.xid, facts.boot_id) not in logged
    ]
    return (*before, *fresh)[-MAX_XIDS:]


def _latches(known: GpuState, gpu: GpuFacts, facts: HostFacts, at: str) -> tuple[Latch, ...]:
    held = {latch.check: latch for latch in known.latched}
    for check, clears_on in _new_latches(known, gpu, facts, at):
        old = held.get(check)
        since = at if old is None else old.since
        # A latch that needs an acknowledgement is never weakened to one that a boot clears.
        kept = _ACK if old is not None and old.clears_on == _ACK else clears_on
        held[check] = Latch(check, since, kept, facts.boot_id)
    return tuple(held.values())


def _new_latches(
    known: GpuState, gpu: GpuFacts, facts: HostFacts, at: str
) -> Iterable[tuple[str, str]]:
    if gpu.ecc.volatile_dbe:
        yield DBE, _RELOAD
    if any(status in ("gpu_is_lost", "reset_required") for status in gpu.read_status.values()):
        yield LOST, _BOOT
    for event in facts.kernel.xids:
        if event.gpu == gpu.index and event.xid in LATCHING_XIDS:
            repeated = event.xid == OFF_THE_BUS and _losses(known, at) > 1
            yield f"xid.{event.xid}", _ACK if repeated else LATCHING_XIDS[event.xid]


def _losses(known: GpuState, at: str) -> int:
    """Count the boots in which the GPU fell off the bus, within the span that counts."""
    oldest = datetime.fromisoformat(at) - timedelta(days=REPEAT_DAYS)
    return sum(
        seen.xid == OFF_THE_BUS and datetime.fromisoformat(seen.at) >= oldest for seen in known.xids
    )


def acknowledge(
    state: State, check: str, uuid: str, *, by: str, reason: str, now: datetime
) -> State:
    """Return the state after someone took note of a fault: its latch goes, its baseline moves up.

    Raises:
        AckError: If the GPU is not known or nothing of that name waits for an acknowledgement.
    """
    known = state.gpus.get(uuid)
    if known is None:
        raise AckError(f"{uuid} is not in the state file; known: {', '.join(state.gpus) or 'none'}")
    grown = check == "ecc.dbe.growth" and (known.aggregate_dbe or 0) > (known.baseline_dbe or 0)
    latched = any(latch.check == check for latch in known.latched)
    if not grown and not latched:
        waiting = ", ".join(_waiting(known)) or "none"
        raise AckError(f"{check} on {uuid} waits for no acknowledgement; waiting: {waiting}")
    ack = Ack(
        check=check,
        at=now.isoformat(timespec="seconds"),
        by=by,
        reason=reason,
        baseline={"dbe": known.aggregate_dbe or 0},
    )
    fresh = replace(
        known,
        baseline_dbe=known.aggregate_dbe if grown else known.baseline_dbe,
        latched=tuple(latch for latch in known.latched if latch.check != check),
        acks=(*known.acks, ack),
    )
    return replace(state, written_at=ack.at, gpus={**state.gpus, uuid: fresh})


def _waiting(known: GpuState) -> list[str]:
    grown = (known.aggregate_dbe or 0) > (known.baseline_dbe or 0)
    return [*(["ecc.dbe.growth"] if grown else []), *(latch.check for latch in known.latched)]
