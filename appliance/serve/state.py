"""What outlives the container: ends of earlier runs, the last refusal, a host that needs help.

One small JSON file on `gate.state_dir`, written whole and renamed. A file that cannot be read as
such is set aside and forgotten. A spare file keeps the room for the next record, so that the end of
a run is kept even when the volume has filled up meanwhile. Wall-clock times in seconds since 1970.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    from collections.abc import Mapping

QUIET_S = 60.0
"""The same refusal is said at most this often."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""A volume without room, or beyond its quota."""

_FILE = "serve.json"
_LOCK = "lock"
_SPARE = "serve.spare"
_SPARE_BYTES = 32 * 1024
_MOST_ENDS = 100  # of about 100 bytes: two records fit into the spare
_GROWTH_BYTES = 1024
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class End:
    """One run that ended although nobody asked it to."""

    at: float
    exit_code: int
    code: str


@dataclass(frozen=True)
class Running:
    """A run that has begun; found at the next start, it ended without saying so."""

    at: float
    boot_id: str


@dataclass(frozen=True)
class HostAction:
    """Processes that even SIGKILL does not end; only the host can help.

    Attributes:
        boot_id: Boot in which it happened; the marker lapses with the next one.
        pid_namespace: Where the process ids are valid.
        processes: `PID:STATE` of each.
    """

    boot_id: str
    pid_namespace: str
    processes: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """The whole file."""

    ends: tuple[End, ...] = ()
    running: Running | None = None
    refusal: End | None = None
    host_action: HostAction | None = field(default=None)


def recent_ends(record: Record, *, per_s: float, now: float) -> tuple[End, ...]:
    """Return the ends of the last `per_s` seconds.

    One that a clock set back has put into the future counts too, but not for ever: beyond `per_s`
    it was stamped by a clock that was wrong.
    """
    return tuple(end for end in record.ends if abs(now - end.at) < per_s)


def budget_fault(
    record: Record, *, count: int, per_s: float, now: float, path: Path
) -> Fault | None:
    """Return why this start must be refused, None if the restart budget allows it.

    `count` ends within `per_s` use it up; 0 allows no start after the first end.
    """
    recent = recent_ends(record, per_s=per_s, now=now)
    if len(recent) < max(1, count):
        return None
    wait_s = per_s - (now - min(end.at for end in recent[-max(1, count) :]))
    causes = ", ".join(dict.fromkeys(end.code for end in recent))
    return Fault(
        "RESTART_BUDGET",
        "runtime.restart_budget",
        f"must be fewer than {max(1, count)} ends within {per_s:g} s",
        f"{len(recent)} ({causes})",
        f"run `appliance doctor`, then delete {path} or wait {max(wait_s, 0):.0f} s",
    )


def quiet_s(record: Record, *, code: str, now: float) -> float:
    """Return how long a refusal must be held back, so that it is said once a minute."""
    last = record.refusal
    if last is None or last.code != code or not 0 <= now - last.at < QUIET_S:
        return 0.0
    return QUIET_S - (now - last.at)


def host_action_fault(record: Record, *, boot_id: str, namespace: str, path: Path) -> Fault | None:
    """Return why the host must be helped first, None if the marker is absent or has lapsed."""
    marker = record.host_action
    if marker is None or marker.boot_id != boot_id:
        return None
    if marker.pid_namespace == namespace and not any(map(_exists, marker.processes)):
        return None
    return Fault(
        "HOST_ACTION_REQUIRED",
        str(path),
        "no process of an earlier run may hang in the driver",
        ", ".join(marker.processes),
        "reboot the host; a GPU reset does not end such a process",
    )


def unclean_end(record: Record, *, boot_id: str, now: float) -> End | None:
    """Return the end of a run that was killed, None if the last one said that it ended.

    A reboot of the host ends every run without a word and is no fault of the appliance.
    """
    if record.running is None or record.running.boot_id != boot_id:
        return None
    return End(now, 0, "UNCLEAN_STOP")


def rebooted(record: Record, *, boot_id: str) -> bool:
    """Return whether the host went down under the last run, without asking it to stop."""
    return (
        record.running is not None
        and "" not in (boot_id, record.running.boot_id)
        and (record.running.boot_id != boot_id)
    )


_NO_RECORD = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)


def read_record(folder: Path) -> Record:
    """Return the record without touching it, an empty one if there is none to read."""
    try:
        return _parse(json.loads((folder / _FILE).read_text(encoding="utf-8")))
    except _NO_RECORD:
        return Record()


def is_held(folder: Path) -> bool:
    """Tell whether an appliance runs on the directory; True where nobody may ask."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


class StateDirectory:
    """The directory, held by one appliance at a time."""

    def __init__(self, path: Path) -> None:
        """Make it if it is missing and take its lock.

        Raises:
            ApplianceError: 12 if it cannot be written or another appliance holds it.
        """
        self.path = path
        self.run = path / "run"
        self.file = path / _FILE
        try:
            self.run.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ApplianceError(ExitCode.CONTAINER, directory_fault(path, error)) from error
        try:
            _lock(self._lock)
        except OSError as error:
            os.close(self._lock)
            what, value = "must belong to one appliance at a time", "another one runs"
            fix = "stop it or give this one its own gate.state_dir"
            fault = Fault("STATE_DIR_IN_USE", f"gate.state_dir {path}", what, value, fix)
            raise ApplianceError(ExitCode.CONTAINER, fault) from error
        self._remove_unfinished()

    def load(self) -> Record:
        """Read the record; a file that is none is set aside and an empty record returned."""
        try:
            return _parse(json.loads(self.file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return Record()
        except _NO_RECORD:
            self.file.replace(self.file.with_suffix(".bad"))
            return Record()

    def reserve(self) -> None:
        """Write the spare anew, so that the next record has its room whatever else is written.

        Raises:
            OSError: If the volume has no room for it.
        """
        self._make_spare(_SPARE_BYTES)

    def _make_spare(self, size: int) -> None:
        write_atomically(self.path / _SPARE, " " * size)

    def save(self, record: Record, *, spare: bool = True) -> None:
        """Write the record whole or not at all; into the spare's room if there is no other.

        Args:
            record: What to keep.
            spare: The spare may be used up.

        Raises:
            OSError: If the directory cannot be written.
        """
        kept = replace(record, ends=record.ends[-_MOST_ENDS:])
        text = json.dumps(asdict(kept), indent=1) + "\n"
        try:
            write_atomically(self.file, text)
        except OSError as error:
            if not spare or error.errno not in FULL:
                raise
            self._save_in_spare(text.encode(), error)

    def _save_in_spare(self, data: bytes, full: OSError) -> None:
        """Write over the spare's own blocks and give it the record's name."""
        path = self.path / _SPARE
        try:
            with path.open("r+b") as file:
                if len(data) > os.fstat(file.fileno()).st_size:
                    raise full
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                file.truncate(len(data))
                os.fsync(file.fileno())
        except FileNotFoundError:
            raise full from None
        path.replace(self.file)
        for size in (_SPARE_BYTES, len(data) + _GROWTH_BYTES):
            # The old record and the spare's rest have made room for one more record at least.
            with contextlib.suppress(OSError):
                return self._make_spare(size)
        return None

    def _remove_unfinished(self) -> None:
        """Remove what runs left that were killed while they wrote; only the lock's holder may."""
        for folder in (self.path, self.run):
            for name in ("serve", "last_run", "admin"):
                for path in folder.glob(f"{name}.*.tmp"):
                    with contextlib.suppress(OSError):
                        path.unlink()

    def close(self) -> None:
        """Let the next appliance have it."""
        os.close(self._lock)


def directory_fault(path: Path, error: OSError) -> Fault:
    """Return why a directory cannot hold the state: no room, or not this user's."""
    what, fix = "must be a directory this user may write", "create it for this user"
    if error.errno in FULL or error.errno == errno.EFBIG:
        what, fix = "must take small files", "free space on the volume"
    value, fix = error.strerror or str(error), f"{fix} or set gate.state_dir"
    return Fault("STATE_DIR", f"gate.state_dir {path}", what, value, fix)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by a new one that is on the disk before it has the name.

    Raises:
        OSError: If it cannot be written; nothing is left of it then.
    """
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _lock(descriptor: int) -> None:
    """Take the lock; who only asks whether it is held has it for a moment (`is_held`)."""
    for _ in range(5):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
    return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def boot_id() -> str:
    """Return the id of this boot of the host, empty where the kernel does not say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Return the id of this pid namespace, empty where the kernel does not say."""
    try:
        return str(_PID_NAMESPACE.readlink())
    except OSError:
        return ""


def _exists(process: str) -> bool:
    number = process.partition(":")[0]
    return not number.isdigit() or Path(f"/proc/{number}").exists()


def _parse(data: Mapping[str, Any]) -> Record:
    return Record(
        ends=tuple(End(**end) for end in data["ends"]),
        running=Running(**data["running"]) if data["running"] else None,
        refusal=End(**data["refusal"]) if data["refusal"] else None,
        host_action=_parse_marker(data["host_action"]),
    )


def _parse_marker(data: Mapping[str, Any] | None) -> HostAction | None:
    if data is None:
        return None
    processes = tuple(str(process) for process in data["processes"])
    return HostAction(str(data["boot_id"]), str(data["pid_namespace"]), processes)
