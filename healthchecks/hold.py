"""One appliance a GPU: a lock file for each UUID, held as long as its process lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_held: dict[str, int] = {}
"""Open lock files of this process by path; closing one would give its GPU up."""


def hold_gpus(folder: Path, uuids: Sequence[str], *, keep: bool) -> dict[str, str]:
    """Take the lock of every GPU; returns the owner of each that another process holds.

    With `keep` the locks stay until this process ends, else they are given back at once. A folder
    that
    cannot be written locks nothing.
    """
    owners: dict[str, str] = {}
    for uuid in uuids:
        path = str(folder / f"{uuid}.lock")
        if path in _held:
            continue
        descriptor = _open(path)
        if descriptor is None:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owners[uuid] = (
                os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
            )
            os.close(descriptor)
            continue
        if keep:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            _held[path] = descriptor
        else:
            os.close(descriptor)
    return owners


def release_gpus() -> None:
    """Give back every lock that this process holds."""
    while _held:
        _, descriptor = _held.popitem()
        os.close(descriptor)


def _open(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    return None
