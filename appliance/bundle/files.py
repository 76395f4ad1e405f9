"""Reads the end of a file that may be large, a pipe, a link, or gone."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

MOST_BYTES = 2 * MIB
"""Of one file of the bundle."""


@dataclass(frozen=True)
class Text:
    """A text of the bundle and how many bytes before it were left out."""

    text: str
    left_out: int = 0


def read_tail(path: Path, *, follow: bool = False) -> Text:
    """Return the last lines of a plain file, at most `MOST_BYTES`.

    A line that would be cut in two is left out whole: half a line may hold half a secret.

    Args:
        path: The file.
        follow: Whether a link may lead there; not on a volume that somebody else writes.

    Raises:
        OSError: If it is no plain file or cannot be read.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    with os.fdopen(descriptor, "rb") as file:
        begin = max(0, status.st_size - MOST_BYTES)
        file.seek(begin)
        content = file.read(MOST_BYTES)
    return cut(content, already=begin)


def cut(content: bytes, *, already: int = 0) -> Text:
    """Return the last whole lines of a content, at most `MOST_BYTES`."""
    begin = max(0, len(content) - MOST_BYTES)
    if begin or already:
        line_end = content.find(b"\n", max(0, begin - 1))
        begin = len(content) if line_end < 0 else line_end + 1
    return Text(content[begin:].decode("utf-8", errors="replace"), already + begin)
