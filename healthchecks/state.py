"""What is remembered of the machine between runs."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - codec.py resolves the annotations at run time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Latch:
    """A fault that stays until a boot, a driver reload or an acknowledgement."""

    check: str
    since: str
    clears_on: str
    boot_id: str | None = None


@dataclass(frozen=True)
class Ack:
    """One acknowledgement: from `at` on, the check counts from `baseline`."""

    check: str
    at: str
    by: str
    reason: str
    baseline: Mapping[str, int]


@dataclass(frozen=True)
class XidSeen:
    """One GPU error number that was seen, with the boot it was seen in."""

    xid: int
    at: str
    boot_id: str | None
    source: str = "kmsg"


@dataclass(frozen=True)
class GpuState:
    """What is remembered of one GPU; times are ISO, counts as in the facts of the last run."""

    first_seen: str
    last_seen: str
    serial: str | None = None
    bus_id: str | None = None
    name: str | None = None
    aggregate_sbe: int | None = None
    aggregate_dbe: int | None = None
    peak_sbe: int | None = None
    peak_dbe: int | None = None
    baseline_dbe: int | None = None
    volatile_dbe: int | None = None
    retired_sbe: int | None = None
    retired_dbe: int | None = None
    pending: bool | None = None
    pending_since: str | None = None
    dbe_history: tuple[tuple[str, int], ...] = ()
    replay: int | None = None
    aer_fatal: int | None = None
    best_width: int | None = None
    best_generation: int | None = None
    best_links: Mapping[str, int] = field(default_factory=dict[str, int])
    xids: tuple[XidSeen, ...] = ()
    latched: tuple[Latch, ...] = ()
    acks: tuple[Ack, ...] = ()


@dataclass(frozen=True)
class State:
    """The state file: GPUs by UUID; `trusted` is False after the file was set aside."""

    written_at: str | None = None
    boot_id: str | None = None
    driver_version: str | None = None
    gpus: Mapping[str, GpuState] = field(default_factory=dict[str, GpuState])
    trusted: bool = True
    note: str = ""
