"""Shows how far a run is: a bar on a terminal, one event line a shard elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.quantize.calibrate import LayerDone
    from appliance.quantize.report import ShardResult

_BAR_WIDTH = 30
_REDRAW_S = 0.1


class Progress:
    """Progress of one run, written to `stream`."""

    def __init__(
        self, stream: TextIO, *, weights: int, shards: int, clock: Callable[[], float] | None = None
    ) -> None:
        """Start the clock.

        Args:
            stream: Where to write, normally stderr.
            weights: Weights to quantize in all.
            shards: Files to write in all.
            clock: Monotonic seconds; the system's by default.
        """
        self._stream = stream
        self._bar = stream.isatty()
        self._weights = weights
        self._shards = shards
        self._clock = clock or time.monotonic
        self._begun = self._clock()
        self._drawn = 0.0
        self._done = 0
        self._reused = 0
        self._finished = 0

    def advance(self, weights: int) -> None:
        """Count weights as done."""
        self._done += weights
        now = self._clock()
        if self._bar and now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._draw(now)

    def shard(self, result: ShardResult, *, resumed: bool) -> None:
        """Report a finished file; a resumed one was made by an earlier run."""
        self._finished += 1
        if resumed:
            self._done += result.weights
            self._reused += result.weights
        if self._bar:
            self._draw(self._clock())
            return
        self._stream.write(
            f"INFO quantize.shard name={result.shard} number={self._finished}/{self._shards}"
            f" weights={result.weights} seconds={result.seconds:.2f}"
            f" relative_mse={result.relative_mse:.3e} resumed={str(resumed).lower()}\n"
        )
        self._stream.flush()

    def layer(self, done: LayerDone) -> None:
        """Report a calibrated layer."""
        errors = [result.output_error or 0.0 for result in done.results]
        rounded = [result.output_error_rtn or 0.0 for result in done.results]
        text = (
            f"layer {done.number}/{done.layers}"
            f" output_error={sum(errors) / max(len(errors), 1):.3e}"
            f" rtn={sum(rounded) / max(len(rounded), 1):.3e} seconds={done.seconds:.2f}"
        )
        if self._bar:
            self._stream.write(f"\r\x1b[Kcalibrate {text}")
        else:
            self._stream.write(f"INFO quantize.{text.replace(' ', ' number=', 1)}\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        """Write one warning."""
        clear = "\r\x1b[K" if self._bar else ""
        self._stream.write(f"{clear}WARNING quantize.note {text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the bar's line."""
        if self._bar:
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self, now: float) -> None:
        share = self._done / self._weights if self._weights else 1.0
        filled = round(share * _BAR_WIDTH)
        fresh = self._done - self._reused
        rate = fresh / max(now - self._begun, 1e-9)
        left = (self._weights - self._done) / rate if rate else 0.0
        self._stream.write(
            f"\r\x1b[Kquantize [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {share:4.0%}"
            f"  {rate / 1e6:.1f} M weights/s  {left:.0f} s left"
            f"  shard {min(self._finished + 1, self._shards)}/{self._shards}"
        )
        self._stream.flush()
