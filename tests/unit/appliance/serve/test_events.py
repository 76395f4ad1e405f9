"""The event log's two forms."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import IO

import pytest

from appliance.serve.events import LONGEST_TEXT, EventLog
from appliance.serve.log_sink import LogSink


def noon() -> datetime:
    return datetime(2026, 11, 29, 12, 0, 0, 5000, tzinfo=UTC)


def test_json_form_is_one_object_a_line_whatever_the_text_holds() -> None:
    stream = io.StringIO()
    log = EventLog("json", "info", stream=stream, now=noon)

    log.info("engine", line='two\nlines "quoted" \x1b[0m \u2028 end', names=("a", "b"), none=None)

    assert stream.getvalue().count("\n") == 1
    assert json.loads(stream.getvalue()) == {
        "time": "2026-11-29T12:00:00.005Z",
        "level": "info",
        "event": "engine",
        "line": 'two\nlines "quoted" \x1b[0m \u2028 end',
        "names": ["a", "b"],
        "none": None,
    }


def test_text_form_quotes_what_would_break_the_line() -> None:
    stream = io.StringIO()
    log = EventLog("text", "info", stream=stream, now=noon)

    log.warning("serve.x", plain="a/b", spaced="a b", empty="", line="a\nb", share=0.5, on=True)

    assert stream.getvalue() == (
        '2026-11-29T12:00:00.005Z WARNING serve.x plain=a/b spaced="a b" empty="" '
        'line="a\\nb" share=0.5 on=true\n'
    )


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("info", 3), ("error", 1)])
def test_events_below_the_level_are_left_out(level: str, count: int) -> None:
    stream = io.StringIO()
    log = EventLog("text", level, stream=stream)

    for write in (log.debug, log.info, log.warning, log.error):
        write("x")

    assert stream.getvalue().count("\n") == count


def test_long_text_is_cut() -> None:
    stream = io.StringIO()

    EventLog("json", "info", stream=stream).info("engine", line="x" * 100_000)

    assert len(json.loads(stream.getvalue())["line"]) == LONGEST_TEXT + 3


def test_log_without_a_reader_goes_quiet() -> None:
    stream = io.StringIO()
    log = EventLog("json", "info", stream=stream)
    stream.close()

    log.error("x")
    log.error("x")


class FullAtFirst(io.StringIO):
    """A file on a disk that is full for the first line."""

    def __init__(self) -> None:
        super().__init__()
        self.full = True

    def write(self, text: str) -> int:
        if self.full:
            self.full = False
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_log_goes_on_after_a_full_disk() -> None:
    stream = FullAtFirst()
    log = EventLog("text", stream=stream)

    log.info("lost")
    log.info("kept")

    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["kept"]


@pytest.fixture
def pipe() -> Iterator[tuple[int, IO[str]]]:
    """A pipe of two pages, each with room for one piece, and a text stream that writes into it."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 8192)
    os.set_blocking(reader, False)
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        yield reader, stream
    os.close(reader)


def test_sink_drops_and_counts_lines_while_there_is_no_room(pipe: tuple[int, IO[str]]) -> None:
    reader, stream = pipe
    sink = LogSink(stream, patience_s=0.05)

    kept = [sink.write(letter * 4095) for letter in "abcde"]

    assert kept == [True, True, False, False, False]
    assert sink.lost == 3
    assert os.read(reader, 1 << 16) == b"a" * 4095 + b"\n" + b"b" * 4095 + b"\n"
    assert sink.write("again")
    assert sink.lost == 0
    assert os.read(reader, 1 << 16) == b"again\n"


def test_sink_ends_a_line_that_was_cut_before_the_next(pipe: tuple[int, IO[str]]) -> None:
    reader, stream = pipe
    sink = LogSink(stream, patience_s=0.05)

    assert not sink.write("y" * 9000)
    assert os.read(reader, 1 << 16) == b"y" * 8192
    assert sink.write("whole")

    assert os.read(reader, 1 << 16) == b"\nwhole\n"


def test_sink_that_lets_go_of_a_stuck_stream_waits_no_more(pipe: tuple[int, IO[str]]) -> None:
    reader, stream = pipe
    sink = LogSink(stream, patience_s=0.05)
    while sink.write("z" * 4095):
        pass

    sink.let_go()

    stream.write("more than a pipe holds" * 1000)
    stream.flush()
    assert b"more" not in os.read(reader, 1 << 16)


def test_log_tells_what_was_lost_before_it_goes_on(pipe: tuple[int, IO[str]]) -> None:
    reader, stream = pipe
    log = EventLog("text", stream=stream)
    log._sink = LogSink(stream, patience_s=0.05)
    for _ in range(5):
        log.info("engine", line="x" * 4000)
    os.read(reader, 1 << 16)

    log.info("after")

    told = os.read(reader, 1 << 16).decode().splitlines()
    assert [line.split(maxsplit=1)[1] for line in told] == [
        "WARNING log.lost lines=3",
        "INFO after",
    ]


def test_log_without_a_stderr_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)

    EventLog().error("nobody.reads")
