"""Shows how far a fetch is: a bar on a terminal, elsewhere event lines, one a file at least."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

from appliance.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

_WIDTH = 30
_REDRAW_S = 0.2
_LINE_S = 15.0


class FetchProgress:
    """Progress of one fetch, written to `stream`."""

    def __init__(
        self, stream: TextIO, *, total: int, files: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the clock; `total` counts bytes, `files` those of the repository."""
        self._stream = stream
        self._bar = stream.isatty()
        self._total = total
        self._files = files
        self._clock = clock
        self._begun = self._told = clock()
        self._done = 0
        self._finished = 0

    def advance(self, count: int) -> None:
        """Count bytes; negative ones have to be fetched again."""
        self._done += count
        now = self._clock()
        if now - self._told >= (_REDRAW_S if self._bar else _LINE_S):
            self._told = now
            self._draw(now)

    def file(self, name: str, size: int, *, resumed: int) -> None:
        """Report a finished file; `resumed` bytes of it were there before."""
        self._finished += 1
        if self._bar:
            self._draw(self._clock())
            return
        self._stream.write(
            f"INFO fetch.file name={name} number={self._finished}/{self._files} bytes={size}"
            f" resumed={resumed}\n"
        )
        self._stream.flush()

    def close(self) -> None:
        """Leave the bar's line."""
        if self._bar:
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self, now: float) -> None:
        share = min(1.0, max(0.0, self._done / self._total)) if self._total else 1.0
        rate = max(self._done, 0) / max(now - self._begun, 1e-9)
        text = f"{share:4.0%} of {format_bytes(self._total)}  {format_bytes(int(rate))}/s"
        if self._bar:
            filled = round(share * _WIDTH)
            bar = "#" * filled + "." * (_WIDTH - filled)
            self._stream.write(f"\r\x1b[Kfetch [{bar}] {text}  {self._finished}/{self._files}")
        else:
            self._stream.write(
                f"INFO fetch.progress bytes={max(self._done, 0)} total={self._total}"
                f" bytes_per_s={int(rate)} files={self._finished}/{self._files}\n"
            )
        self._stream.flush()
