"""One `.tar.gz` with a manifest: made whole beside its place, then given its name."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import os
import secrets
import stat
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.bundle.secrets import dump
from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from pathlib import Path

FOLDER = "appliance-bundle"
SCHEMA = "appliance-bundle/1"
MANIFEST = "MANIFEST.json"
MODE = 0o600

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS})
"""What a file system says that knows no second name of a file."""

_FILE = "a file"


@dataclass(frozen=True)
class Entry:
    """One file of the bundle, without secrets by now, or why it could not be had.

    Attributes:
        path: Its name below the bundle's folder.
        content: What it holds, None if it could not be had.
        reason: Why not.
        left_out: Bytes before the content that were too many.
    """

    path: str
    content: bytes | None = None
    reason: str = ""
    left_out: int = 0


def manifest_of(entries: Sequence[Entry], *, version: str, made_at: datetime) -> dict[str, Any]:
    """Return what is inside with digests, and what is not and why; both in the order given."""
    return {
        "schema": SCHEMA,
        "version": version,
        "made_at": made_at.isoformat(timespec="seconds"),
        "files": [
            {
                "path": entry.path,
                "bytes": len(entry.content),
                "sha256": hashlib.sha256(entry.content).hexdigest(),
                "left_out_bytes": entry.left_out,
            }
            for entry in entries
            if entry.content is not None
        ],
        "missing": [
            {"path": entry.path, "reason": entry.reason}
            for entry in entries
            if entry.content is None
        ],
    }


def pack(entries: Sequence[Entry], manifest: dict[str, Any], made_at: datetime) -> bytes:
    """Return the archive: the manifest first, then the files in the order given."""
    contents = {MANIFEST: dump(manifest).encode()}
    contents |= {entry.path: entry.content for entry in entries if entry.content is not None}
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", filename="", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path, content in contents.items():
            member = tarfile.TarInfo(f"{FOLDER}/{path}")
            member.size, member.mode, member.mtime = len(content), MODE, int(made_at.timestamp())
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def refuse_existing(path: Path, *, force: bool) -> None:
    """Refuse a place that is taken.

    Raises:
        ApplianceError: OUTPUT_EXISTS, exit 2; OUTPUT_UNWRITABLE, exit 12, for a place that cannot
            be looked at.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    if not force or not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise _exists(path, _FILE if stat.S_ISREG(mode) or stat.S_ISLNK(mode) else "no plain file")


def write_whole(path: Path, content: bytes, *, force: bool) -> None:
    """Give a content its name once it is on the disk; nothing is left of one that fails.

    Raises:
        ApplianceError: OUTPUT_EXISTS, exit 2; DISK_FULL or OUTPUT_UNWRITABLE, exit 12.
    """
    refuse_existing(path, force=force)
    beside = path.parent / f".{FOLDER}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        _write(beside, content)
        if force:
            beside.replace(path)
        else:
            _give_name(beside, path)
    except FileExistsError as error:
        raise _exists(path, _FILE) from error
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError, ValueError):
            beside.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, MODE), "wb") as file:
        os.fchmod(file.fileno(), MODE)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _give_name(beside: Path, path: Path) -> None:
    """Name a file without taking the name from another, which a rename would."""
    try:
        path.hardlink_to(beside)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        refuse_existing(path, force=False)
        beside.replace(path)


def _exists(path: Path, value: str) -> ApplianceError:
    what, fix = "the bundle must be a new file", "name another by --output"
    fix += ", or add --force" if value == _FILE else ""
    return ApplianceError(ExitCode.USAGE, Fault("OUTPUT_EXISTS", str(path), what, value, fix))


def _unwritable(path: Path, error: OSError | ValueError) -> ApplianceError:
    reason = getattr(error, "strerror", None) or str(error)
    if getattr(error, "errno", None) in _NO_ROOM:
        what, fix = "the bundle must fit", "make room or name another place by --output"
        fault = Fault("DISK_FULL", str(path), what, reason, fix)
    else:
        what, fix = "the bundle must be writable", "name another place by --output"
        fault = Fault("OUTPUT_UNWRITABLE", str(path), what, reason, fix)
    return ApplianceError(ExitCode.CONTAINER, fault)
