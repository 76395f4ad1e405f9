"""A tiny file system of its own, for what happens when a volume is full."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNSHARE = ("unshare", "--mount", "--user", "--map-root-user")


class SmallVolume:
    """A mounted tmpfs, reached through the process that holds its namespace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Write until nothing more goes in."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(512)):
                pass

    def empty(self) -> None:
        """Make room again."""
        self._filler.unlink()


@contextlib.contextmanager
def small_volume(at: Path, size: str) -> Iterator[SmallVolume]:
    """Mount a tmpfs of this size for the time of the context; skip where that is not allowed."""
    at.mkdir()
    script = f"mount -t tmpfs -o size={size} none {at} && echo mounted && exec cat"
    command = (*_UNSHARE, "sh", "-c", script)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            if holder.stdout.readline() != b"mounted\n":
                pytest.skip("no user namespaces: a tmpfs cannot be mounted")
            yield SmallVolume(Path(f"/proc/{holder.pid}/root") / at.relative_to("/"))
        finally:
            holder.stdin.close()
