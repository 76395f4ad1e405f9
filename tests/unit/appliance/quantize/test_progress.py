"""The bar on a terminal and the lines elsewhere."""

from __future__ import annotations

import io
from collections.abc import Callable

from appliance.quantize.progress import Progress
from appliance.quantize.report import ShardResult, TensorResult


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def clock(*times: float) -> Callable[[], float]:
    """A clock that shows these times one after the other."""
    left = iter(times)
    return lambda: next(left)


def shard(weights: int) -> ShardResult:
    tensor = TensorResult("m", (1, weights), "m", 1.0, 0.5, 100.0)
    return ShardResult("a.safetensors", 2.0, (tensor,), ())


def test_progress_on_a_terminal_draws_share_speed_and_time_left() -> None:
    stream = Terminal()
    progress = Progress(stream, weights=4_000_000, shards=2, clock=clock(0.0, 1.0))

    progress.advance(1_000_000)

    assert stream.getvalue() == (
        f"\r\x1b[Kquantize [{'#' * 8}{'.' * 22}]  25%  1.0 M weights/s  3 s left  shard 1/2"
    )


def test_progress_on_a_terminal_redraws_ten_times_a_second_at_most() -> None:
    stream = Terminal()
    progress = Progress(stream, weights=100, shards=1, clock=clock(0.0, 1.0, 1.05, 1.2))

    for _ in range(3):
        progress.advance(10)

    assert stream.getvalue().count("\r") == 2


def test_progress_elsewhere_writes_one_event_a_shard() -> None:
    stream = io.StringIO()
    progress = Progress(stream, weights=32, shards=1, clock=clock(0.0, 1.0, 2.0))

    progress.advance(32)
    progress.shard(shard(32), resumed=False)
    progress.close()

    assert stream.getvalue() == (
        "INFO quantize.shard name=a.safetensors number=1/1 weights=32 seconds=2.00"
        " relative_mse=5.000e-03 resumed=false\n"
    )


def test_progress_does_not_count_resumed_weights_as_speed() -> None:
    stream = Terminal()
    progress = Progress(stream, weights=3_000_000, shards=2, clock=clock(0.0, 1.0, 2.0))

    progress.shard(shard(1_000_000), resumed=True)
    progress.advance(1_000_000)

    assert "67%  0.5 M weights/s  2 s left  shard 2/2" in stream.getvalue()


def test_progress_note_on_a_terminal_clears_the_bar_first() -> None:
    stream = Terminal()

    Progress(stream, weights=1, shards=1, clock=clock(0.0)).note("W_X y")

    assert stream.getvalue() == "\r\x1b[KWARNING quantize.note W_X y\n"
