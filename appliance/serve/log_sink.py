"""Where log lines go: a stream whose reader may be slow or stuck without stopping the service.

A pipe that nobody reads is full after 64 KiB, and a plain write then waits for ever: first the
engine's output stands still, then the engine, and every probe turns red over a log. So a line waits
a while for room, and lines after it are dropped and counted until there is room again.
"""

from __future__ import annotations

import io
import os
import select
import time
from typing import IO

PATIENCE_S = 2.0
"""Seconds that one line waits for room; below what the supervisor's loop may take for a turn."""

_ATOMIC = 4096
"""Bytes that a pipe with room takes at once (PIPE_BUF of Linux)."""


class LogSink:
    """Writes whole lines to a stream, by its descriptor where it has one."""

    def __init__(self, stream: IO[str], patience_s: float = PATIENCE_S) -> None:
        """Write to `stream`; what lies in its buffer is written first."""
        self._stream = stream
        self._patience_s = patience_s
        self._descriptor = _descriptor(stream)
        self._torn = False
        self.lost = 0
        """Lines dropped since the last one that was written; not 0 means stuck."""

    def write(self, line: str) -> bool:
        """Write a line and its end; False if there was no room for it.

        Raises:
            OSError: If the stream takes no more.
            ValueError: If the stream is closed.
        """
        if self._descriptor is None or self._stream.closed:
            self._stream.write(line + "\n")
            self._stream.flush()
            return True
        self._stream.flush()
        data = (("\n" if self._torn else "") + line + "\n").encode(errors="backslashreplace")
        deadline = time.monotonic() + (0.0 if self.lost else self._patience_s)
        for begin in range(0, len(data), _ATOMIC):
            if not self._has_room(deadline):
                self.lost += 1
                self._torn = self._torn or begin > 0
                return False
            _write_all(self._descriptor, data[begin : begin + _ATOMIC])
        self._torn = False
        self.lost = 0
        return True

    def let_go(self) -> None:
        """Point a stuck stream at nothing, so that what is still printed waits for nobody."""
        if self.lost and self._descriptor is not None:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._descriptor)
            os.close(nothing)

    def _has_room(self, deadline: float) -> bool:
        """Wait for room; a reader that is gone counts as room, and the write then fails."""
        waiting = select.poll()
        waiting.register(self._stream, select.POLLOUT)
        return bool(waiting.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _descriptor(stream: IO[str]) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, io.UnsupportedOperation):
        return None


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
