"""API keys from a file, and how often one key may call. Standard library only."""

from __future__ import annotations

import hmac
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOOK_EVERY_S = 1.0
"""How often a changed key file is noticed."""

MAX_KEYS = 10_000


def parse_keys(text: str) -> tuple[bytes, ...]:
    """Return the keys of a file: one a line, blank lines and lines that start with `#` left out."""
    lines = (line.strip() for line in text.splitlines())
    keys = dict.fromkeys(line.encode() for line in lines if line and not line.startswith("#"))
    return tuple(keys)[:MAX_KEYS]


def read_keys(path: Path) -> tuple[bytes, ...]:
    """Return the keys of a file; an editor's byte order mark is no part of the first one.

    Raises:
        OSError: If it cannot be read.
        UnicodeDecodeError: If it is no UTF-8.
    """
    return parse_keys(path.read_text(encoding="utf-8-sig"))


class KeyFile:
    """The keys of one file, read again when the file changes.

    A file that disappears or becomes unreadable keeps the last keys known: taking a service away
    because a secret is being rewritten would be worse. An empty file admits nobody.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Read the file for the first time.

        Raises:
            OSError: If it cannot be read.
        """
        self._path = path
        self._clock = clock
        self._stamp = self._look()
        self._keys = read_keys(path)
        self._looked_at = clock()

    def admits(self, offered: bytes) -> bool:
        """Tell whether a key is in the file; the time it takes does not tell which one."""
        self._refresh()
        found = False
        for key in self._keys:
            found = hmac.compare_digest(key, offered) or found
        return found

    def _look(self) -> tuple[int, int, int]:
        status = os.stat(self._path)  # noqa: PTH116 - in the request path
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        try:
            stamp = self._look()
            if stamp != self._stamp:
                self._keys = read_keys(self._path)
                self._stamp = stamp
        except (OSError, UnicodeDecodeError):
            return


class RateLimit:
    """A bucket a key: `per_minute` requests at once, refilled evenly; 0 means no limit."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        """Start with full buckets."""
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: dict[bytes, tuple[float, float]] = {}

    def wait_s(self, key: bytes) -> float:
        """Take one request of `key`; return 0.0, or the seconds until the next one is allowed."""
        if self._per_minute == 0:
            return 0.0
        now = self._clock()
        rate = self._per_minute / 60.0
        level, at = self._buckets.get(key, (float(self._per_minute), now))
        level = min(float(self._per_minute), level + (now - at) * rate)
        if level < 1.0:
            self._buckets[key] = (level, now)
            return (1.0 - level) / rate
        self._buckets[key] = (level - 1.0, now)
        return 0.0
