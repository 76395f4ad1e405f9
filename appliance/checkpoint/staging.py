"""The directory `DST.part` in which a checkpoint is built, so that no half of one looks whole.

The last step renames the directory. A run that was killed leaves `DST.part`, and a later run of the
same job goes on from there. A `DST.part` without the lock file of such a run is somebody else's and
stays untouched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Self

from appliance.checkpoint.document import read_document
from appliance.checkpoint.shards import read_shards
from appliance.checkpoint.writer import storage_errors, sync_directory
from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from appliance.checkpoint.header import Form

LOCK_NAME = ".appliance-staging"


class Staging:
    """The directory `DST.part` of one run; a lock keeps a second run out of it."""

    def __init__(self, target: Path, *, source: Path, is_repair: bool = False) -> None:
        """Name the directories; nothing is created before `with`.

        Args:
            target: The directory to make.
            source: What it is made of: never cleared, wherever it lies.
            is_repair: The target is there, and some of its files will be replaced.
        """
        # Resolved, since `.` has no name to put `.part` behind.
        self.target = Path(os.path.realpath(target))
        self.path = self.target.with_name(self.target.name + ".part")
        self._source = Path(os.path.realpath(source))
        self._is_repair = is_repair
        self._lock: int | None = None

    def __enter__(self) -> Self:
        """Create or reopen `DST.part` and lock it.

        Raises:
            ApplianceError: OUTPUT_FOREIGN (exit 2) if `DST.part` is not an earlier run's, or holds
                the source; OUTPUT_BUSY (exit 2) if another run holds it; OUTPUT_EXISTS (exit 2) if
                another run has just made `DST`; OUTPUT_UNWRITABLE or DISK_FULL (exit 12) if the
                directory cannot be made.
        """
        with storage_errors(self.path):
            self._require_ours()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._require_same()
            if not self._is_repair:
                require_new(self.target)
        except BlockingIOError:
            self._unlock()
            raise self._busy() from None
        except ApplianceError:
            self._unlock()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock; finished files stay for the next run."""
        self._unlock()

    def clear(self) -> None:
        """Remove what an earlier run left, the lock excepted."""
        with storage_errors(self.path):
            for child in self.path.iterdir():
                if child.is_dir() and not child.is_symlink():
                    shutil.rmtree(child)
                elif child.name != LOCK_NAME:
                    child.unlink()

    def commit(self) -> None:
        """Rename `DST.part` to `DST` in one step, everything flushed first.

        The lock file goes along and is removed last: without it, a run that starts meanwhile could
        lock the directory again and clear it.

        Raises:
            ApplianceError: OUTPUT_EXISTS (exit 2) if `DST` came to be meanwhile.
        """
        with storage_errors(self.target):
            sync_directory(self.path)
            try:
                self.path.rename(self.target)
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                    raise
                raise output_exists(self.target) from None
            (self.target / LOCK_NAME).unlink()
            sync_directory(self.target)
            sync_directory(self.target.parent)

    def replace(self, names: Sequence[str]) -> None:
        """Put files of `DST.part` in the place of those of `DST`, each in one step.

        All of them lie there whole, so that a run that is killed leaves no file half done.
        """
        with storage_errors(self.target):
            sync_directory(self.path)
            for name in names:
                (self.path / name).rename(self.target / name)
            sync_directory(self.target)
        self.remove()

    def remove(self) -> None:
        """Remove `DST.part`, the lock last."""
        self.clear()
        with storage_errors(self.path):
            (self.path / LOCK_NAME).unlink()
            self.path.rmdir()

    def _require_ours(self) -> None:
        """Refuse a `DST.part` that no run of ours has made: it would be cleared."""
        if self._source.is_relative_to(self.path):
            raise self._foreign("the source itself")
        if self.path.is_symlink():
            raise self._foreign("a link")
        if not self.path.exists() or (self.path / LOCK_NAME).exists():
            return
        if not self.path.is_dir() or any(self.path.iterdir()):
            raise self._foreign("files of another origin")

    def _require_same(self) -> None:
        """Refuse the lock of a directory that its run has renamed between our open and our lock."""
        mine = os.fstat(self._lock if self._lock is not None else -1)
        with contextlib.suppress(FileNotFoundError):
            there = (self.path / LOCK_NAME).stat()
            if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
                return
        raise self._busy()

    def _foreign(self, value: str) -> ApplianceError:
        what = "the directory to build in is absent, empty, or left by an earlier run"
        fix = "move it away or choose another name for the output"
        fault = Fault("OUTPUT_FOREIGN", str(self.path), what, value, fix)
        return ApplianceError(ExitCode.USAGE, fault)

    def _busy(self) -> ApplianceError:
        what, value = "one run at a time writes a checkpoint", "a lock held by another process"
        fix = "wait for that run or stop it"
        fault = Fault("OUTPUT_BUSY", str(self.path), what, value, fix)
        return ApplianceError(ExitCode.USAGE, fault)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def require_new(target: Path) -> None:
    """Refuse an output directory that has something in it.

    Raises:
        ApplianceError: OUTPUT_EXISTS, exit 2; OUTPUT_UNWRITABLE, exit 12, if it cannot be reached.
    """
    with storage_errors(target):
        empty = target.is_dir() and not any(target.iterdir())
        if not empty and os.path.lexists(target):
            raise output_exists(target)


def require_whole(target: Path, tensors: Mapping[str, Form]) -> None:
    """Refuse a finished output that has lost a part since.

    Args:
        target: The output of an earlier run of the same job.
        tensors: Name to dtype and shape of every tensor that it must hold.

    Raises:
        ApplianceError: OUTPUT_DAMAGED, exit 31.
    """
    try:
        read_document(target / "config.json")
        headers = read_shards(target).headers.values()
        found = {name: form for header in headers for name, form in header.forms.items()}
        value = "" if found == dict(tensors) else "other tensors"
    except ApplianceError as error:
        value = f"{error.faults[0].code} at {error.faults[0].where}"
    if value:
        raise _damaged(target, value)


def require_files(target: Path, sizes: Mapping[str, int]) -> None:
    """Refuse a finished output that has lost a file since, or a part of one.

    Args:
        target: The output of an earlier run of the same job.
        sizes: Name to bytes of every file that it must hold.

    Raises:
        ApplianceError: OUTPUT_DAMAGED, exit 31.
    """
    for name, size in sizes.items():
        try:
            found = (target / name).stat().st_size
        except OSError as error:
            raise _damaged(target, f"{name}: {error.strerror or type(error).__name__}") from None
        if found != size:
            raise _damaged(target, f"{name} of {found} bytes instead of {size}")


def _damaged(target: Path, value: str) -> ApplianceError:
    what, fix = "the finished output of this job must be whole", "remove it and run again"
    fault = Fault("OUTPUT_DAMAGED", str(target), what, value, fix)
    return ApplianceError(ExitCode.CHECKPOINT_CORRUPT, fault)


def output_exists(target: Path) -> ApplianceError:
    """Make the error of an output directory that is in use."""
    return ApplianceError(
        ExitCode.USAGE,
        Fault(
            "OUTPUT_EXISTS",
            str(target),
            "the output is a new or empty directory",
            "a directory with files, or a file",
            "remove it or choose another name",
        ),
    )
