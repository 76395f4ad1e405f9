"""The event log on stderr: one event a line, as JSON or as `LEVEL event key=value`."""

from __future__ import annotations

import errno
import json
import sys
import threading
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Literal

from appliance.serve.log_sink import LogSink

if TYPE_CHECKING:
    from collections.abc import Callable

Value = str | int | float | bool | None | tuple[str, ...]

LEVELS = ("debug", "info", "warning", "error")
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EAGAIN})
"""Lines are lost while these last; later ones are written again."""

LONGEST_TEXT = 8192
"""Characters of one value; longer ones are cut, so that a runaway line stays one event."""


def _utc_now() -> datetime:
    return datetime.now(UTC)


class EventLog:
    """Writes events; safe to call from any thread, and quiet once the reader is gone.

    A reader that reads nothing costs lines, which are counted in a `log.lost` event once it reads
    again, and never the service.
    """

    def __init__(
        self,
        form: Literal["json", "text"] = "json",
        level: str = "info",
        *,
        stream: IO[str] | None = None,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        """Write to `stream` (stderr by default) what is at least as severe as `level`."""
        self._form = form
        self._least = LEVELS.index(level)
        found: IO[str] | None = sys.stderr if stream is None else stream
        if found is None:  # started with stderr closed
            self._least = len(LEVELS)
        self._sink = None if found is None else LogSink(found)
        self._now = now
        self._lock = threading.Lock()

    def debug(self, event: str, **fields: Value) -> None:
        """Write an event that only a developer reads."""
        self.emit("debug", event, fields)

    def info(self, event: str, **fields: Value) -> None:
        """Write a decision or a step and its reason."""
        self.emit("info", event, fields)

    def warning(self, event: str, **fields: Value) -> None:
        """Write that something is degraded but goes on."""
        self.emit("warning", event, fields)

    def error(self, event: str, **fields: Value) -> None:
        """Write what ends this run."""
        self.emit("error", event, fields)

    def emit(self, level: str, event: str, fields: dict[str, Value]) -> None:
        """Write one event with its fields in the order given."""
        if LEVELS.index(level) < self._least:
            return
        line = self._line(level, event, fields)
        with self._lock:
            if self._sink is None:
                return
            try:
                if self._sink.lost:
                    self._sink.write(self._line("warning", "log.lost", {"lines": self._sink.lost}))
                if not self._sink.lost:
                    self._sink.write(line)
            except OSError as error:
                if error.errno not in _PASSING:
                    self._least = len(LEVELS)  # the reader is gone: stderr stays closed
            except ValueError:
                self._least = len(LEVELS)

    def close(self) -> None:
        """Let what is printed after the log wait for no reader that is stuck."""
        if self._sink is not None:
            self._sink.let_go()

    def _line(self, level: str, event: str, fields: dict[str, Value]) -> str:
        cut = {key: _cut(value) for key, value in fields.items()}
        stamp = self._now().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if self._form == "json":
            return json.dumps({"time": stamp, "level": level, "event": event, **cut})
        words = [f"{key}={_word(value)}" for key, value in cut.items()]
        return " ".join((stamp, level.upper(), event, *words))


def _cut(value: Value) -> Value:
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return value[:LONGEST_TEXT] + "..."
    return value


def _word(value: Value) -> str:
    """Spell a value so that one event stays one line and splits at spaces outside quotes."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    text = ",".join(value) if isinstance(value, tuple) else str(value)
    plain = text.isprintable() and text and not any(c in text for c in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=False)
