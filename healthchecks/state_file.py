"""The state file on its volume: written whole or not at all, locked, set aside when corrupt."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from healthchecks.codec import from_plain, to_plain
from healthchecks.state import Ack, GpuState, Latch, State, XidSeen

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

SCHEMA_VERSION = "1"
STATE_NAME, LOCK_NAME, AUDIT_NAME = "state.json", "state.lock", "audit.log"
ACTION_NAME = "HOST_ACTION_REQUIRED"
LOCK_TIMEOUT_S = 5.0
MAX_STATE_BYTES = 64 * 1024**2
"""Hundreds of GPUs with every list full stay far below."""
_LOCK_STEP_S = 0.05


class StateUnavailableError(Exception):
    """The folder cannot be written or its lock is held for too long."""


@dataclass(frozen=True)
class StateFile:
    """The files of one state folder."""

    folder: Path

    @contextlib.contextmanager
    def locked(self, timeout_s: float = LOCK_TIMEOUT_S) -> Generator[None]:
        """Hold the folder's lock, so that two runs do not write over each other.

        Raises:
            StateUnavailableError: If the folder cannot be made or written, or the lock stays held.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StateUnavailableError(f"{self.folder}: {error.strerror}") from error
        try:
            _flock(descriptor, timeout_s, self.folder)
            yield
        finally:
            os.close(descriptor)

    def load(self) -> State:
        """Return the state; a file that makes no sense is set aside, and the state says so.

        Raises:
            StateUnavailableError: If the file is there and cannot be read or moved.
        """
        path = self.folder / STATE_NAME
        try:
            text = _read(path)
        except FileNotFoundError:
            return State()
        except OSError as error:
            raise StateUnavailableError(f"{path}: {error.strerror}") from error
        try:
            return state_of(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            aside = self._set_aside(path)
            return State(trusted=False, note=f"{error}; set aside as {aside.name}")

    def save(self, state: State, writer: str) -> None:
        """Write the state: beside the old one, flushed to disk, then in its place.

        Raises:
            StateUnavailableError: If that fails; the old file is then still whole.
        """
        text = json.dumps(plain_of(state, writer), indent=1) + "\n"
        path, fresh = self.folder / STATE_NAME, self.folder / f"{STATE_NAME}.new"
        try:
            fresh.unlink(missing_ok=True)  # whatever it is, and wherever it leads
            with fresh.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
            _sync(self.folder)
        except OSError as error:
            raise StateUnavailableError(f"{path}: {error.strerror}") from error

    def audit(self, event: Mapping[str, Any]) -> None:
        """Append one line to the audit log.

        Raises:
            StateUnavailableError: If it cannot be written.
        """
        path = self.folder / AUDIT_NAME
        try:
            with os.fdopen(_open_now(path, _APPEND), "a", encoding="utf-8") as file:
                file.write(json.dumps(dict(event)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StateUnavailableError(f"{path}: {error.strerror}") from error

    def require_action(self, reason: str, boot_id: str | None) -> None:
        """Leave word that nothing may start on this boot of the host, and why.

        Raises:
            StateUnavailableError: If it cannot be written.
        """
        path = self.folder / ACTION_NAME
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(
                json.dumps({"reason": reason, "boot_id": boot_id}) + "\n", encoding="utf-8"
            )
        except OSError as error:
            raise StateUnavailableError(f"{path}: {error.strerror}") from error

    def required_action(self, boot_id: str | None) -> str | None:
        """Return what was left word of, None when nothing was or the host has booted since."""
        try:
            word = json.loads(_read(self.folder / ACTION_NAME))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError):
            return f"{ACTION_NAME} on the state volume cannot be read"
        if not isinstance(word, dict):
            return f"{ACTION_NAME} on the state volume makes no sense"
        left = cast("Mapping[str, Any]", word)
        booted = boot_id is not None and left.get("boot_id") not in (None, boot_id)
        return None if booted else str(left.get("reason"))

    def _set_aside(self, path: Path) -> Path:
        aside = path.with_name(f"{path.name}.corrupt-{time.time_ns()}")
        try:
            path.replace(aside)
        except OSError as error:
            raise StateUnavailableError(f"{path}: {error.strerror}") from error
        return aside


_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


def _open_now(path: Path, flags: int) -> int:
    """Open without waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)


def _read(path: Path) -> bytes:
    """Return the content of a plain file; a pipe or a device would never end.

    Raises:
        OSError: If it is no plain file, too large, or cannot be read.
    """
    with os.fdopen(_open_now(path, os.O_RDONLY), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        if status.st_size > MAX_STATE_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MAX_STATE_BYTES} bytes")
        return file.read()


def _flock(descriptor: int, timeout_s: float, folder: Path) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise StateUnavailableError(f"{folder}: locked by another run") from error
            time.sleep(_LOCK_STEP_S)
        else:
            return


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plain_of(state: State, writer: str) -> dict[str, Any]:
    """Return the file's content by its published schema."""
    return {
        "schema_version": SCHEMA_VERSION,
        "written_at": state.written_at or "",
        "writer": writer,
        "boot_id": state.boot_id,
        "driver_version": state.driver_version,
        "gpus": {uuid: _gpu_plain(known) for uuid, known in state.gpus.items()},
    }


def _gpu_plain(known: GpuState) -> dict[str, Any]:
    return {
        "serial": known.serial,
        "bus_id": known.bus_id,
        "name": known.name,
        "first_seen": known.first_seen,
        "last_seen": known.last_seen,
        "aggregate": {"sbe": known.aggregate_sbe, "dbe": known.aggregate_dbe},
        "peak": {"sbe": known.peak_sbe, "dbe": known.peak_dbe},
        "baseline": {"dbe": known.baseline_dbe},
        "volatile": {"dbe": known.volatile_dbe},
        "retired": {
            "sbe": known.retired_sbe,
            "dbe": known.retired_dbe,
            "pending": known.pending,
            "pending_since": known.pending_since,
            "dbe_history": [{"at": at, "dbe": pages} for at, pages in known.dbe_history],
        },
        "replay": known.replay,
        "aer_fatal": known.aer_fatal,
        "best_width": known.best_width,
        "best_gen": known.best_generation,
        "best_links": dict(known.best_links),
        "xids": to_plain(known.xids),
        "latched": to_plain(known.latched),
        "acks": to_plain(known.acks),
    }


def state_of(plain: Any) -> State:  # noqa: ANN401 - whatever the file held
    """Read the file's content.

    Raises:
        ValueError: If it is of another version.
        KeyError, TypeError, AttributeError: If it lacks a part or a part has another kind.
    """
    if plain["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema_version {plain['schema_version']!r} is not {SCHEMA_VERSION!r}")
    members = cast("Mapping[str, Any]", plain["gpus"])
    return State(
        written_at=str(plain["written_at"]),
        boot_id=plain["boot_id"],
        driver_version=plain.get("driver_version"),
        gpus={uuid: _gpu_state(item) for uuid, item in members.items()},
    )


def _gpu_state(item: Mapping[str, Any]) -> GpuState:
    retired = cast("Mapping[str, Any]", item["retired"])
    flat = {
        **{name: item.get(name) for name in ("serial", "bus_id", "name", "replay", "aer_fatal")},
        "first_seen": item["first_seen"],
        "last_seen": item["last_seen"],
        "aggregate_sbe": item["aggregate"].get("sbe"),
        "aggregate_dbe": item["aggregate"].get("dbe"),
        "peak_sbe": item["peak"].get("sbe"),
        "peak_dbe": item["peak"].get("dbe"),
        "baseline_dbe": item.get("baseline", item["aggregate"]).get("dbe"),
        "volatile_dbe": item.get("volatile", {}).get("dbe"),
        "retired_sbe": retired.get("sbe"),
        "retired_dbe": retired.get("dbe"),
        "pending": retired.get("pending"),
        "pending_since": retired.get("pending_since"),
        "best_width": item.get("best_width"),
        "best_generation": item.get("best_gen"),
        "best_links": item.get("best_links", {}),
    }
    known = from_plain(GpuState, flat)
    fresh = replace(
        known,
        dbe_history=tuple(
            (str(step["at"]), int(step["dbe"])) for step in retired.get("dbe_history", ())
        ),
        xids=tuple(from_plain(XidSeen, seen) for seen in item.get("xids", ())),
        latched=tuple(from_plain(Latch, latch) for latch in item.get("latched", ())),
        acks=tuple(from_plain(Ack, ack) for ack in item.get("acks", ())),
    )
    _require_times(fresh)
    return fresh


def _require_times(known: GpuState) -> None:
    """Raise ValueError if a time is none that another one can be taken from."""
    times = [
        known.first_seen,
        known.last_seen,
        known.pending_since,
        *(at for at, _ in known.dbe_history),
        *(seen.at for seen in known.xids),
        *(latch.since for latch in known.latched),
        *(ack.at for ack in known.acks),
    ]
    for text in times:
        if text is not None and datetime.fromisoformat(text).tzinfo is None:
            raise ValueError(f"{text}: a time without its zone")
