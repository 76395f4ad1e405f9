"""A log that nobody reads must not stop the service."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Start

CHATTER = tuple(f"INFO step {number} " + "x" * 200 for number in range(2000))
"""Seven times what a pipe holds."""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def events(reader: int, already: bytes = b"") -> list[dict[str, Any]]:
    """Read until every writer is gone; one event a line, whatever was dropped."""
    read = already
    while chunk := os.read(reader, 1 << 16):
        read += chunk
    return [json.loads(line) for line in read.decode().splitlines()]


def test_serve_goes_on_while_its_log_is_a_full_pipe(start: Start, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    running = start(stderr=writer, behave={"log": CHATTER})
    os.close(writer)
    running.wait_for("ready", 200)
    assert running.probe("live")[0] == 200
    running.family()

    running.stop()

    assert running.wait() == 0
    running.assert_nothing_left()
    told = events(reader)
    assert told[0]["event"] == "serve.start"
    assert 100 < len(told) < 1000


def test_serve_tells_how_many_lines_were_lost_once_somebody_reads(
    start: Start, pipe: tuple[int, int]
) -> None:
    reader, writer = pipe
    running = start(stderr=writer, behave={"log": CHATTER})
    os.close(writer)
    running.wait_for("ready", 200)
    read = os.read(reader, 1 << 20)

    running.stop()

    assert running.wait() == 0
    told = events(reader, read)
    (lost,) = [event["lines"] for event in told if event["event"] == "log.lost"]
    from_engine = [event for event in told if event["event"] == "engine"]
    assert lost + len(from_engine) >= len(CHATTER)
    assert told[-1]["event"] == "serve.end"
