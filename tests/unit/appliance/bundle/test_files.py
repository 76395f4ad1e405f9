"""The end of a file, whatever the file is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.bundle import files
from appliance.bundle.attempt import Got, Missed, attempt, attempt_in_time
from appliance.bundle.files import MOST_BYTES, Text, cut, read_tail
from appliance.errors import ApplianceError, ExitCode, Fault


def test_small_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("one\ntwo")

    assert read_tail(tmp_path / "log") == Text("one\ntwo")


def test_large_file_is_its_last_whole_lines(tmp_path: Path) -> None:
    line = b"x" * 99 + b"\n"
    (tmp_path / "log").write_bytes(b"Authorization: half\n" + line * (MOST_BYTES // 100 + 5))

    found = read_tail(tmp_path / "log")

    assert found.text.encode() == line * (MOST_BYTES // 100)
    assert found.left_out == 20 + 500


def test_cut_that_falls_between_two_lines_costs_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 4)

    assert cut(b"abc\ndef\n") == Text("def\n", 4)
    assert cut(b"abc\n\ndef\n") == Text("def\n", 5)
    assert cut(b"abcdefgh") == Text("", 8)


def test_one_line_that_is_too_long_is_left_out_whole(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * (MOST_BYTES + 1))

    assert read_tail(tmp_path / "log") == Text("", MOST_BYTES + 1)


def test_bytes_that_are_no_text_are_shown_as_such(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\xff\n")

    assert read_tail(tmp_path / "log").text == "\ufffd\n"


def test_pipe_link_and_directory_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "secret").write_text("key")
    (tmp_path / "link").symlink_to("secret")

    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path):
        with pytest.raises(OSError, match=r"plain file|symbolic link"):
            read_tail(path)
    assert read_tail(tmp_path / "link", follow=True).text == "key"


def test_attempt_gives_a_value_or_a_reason() -> None:
    fault = Fault("X", "here", "a thing", "another", "change it")

    def refuse() -> None:
        raise ApplianceError(ExitCode.USAGE, fault, fault)

    assert attempt(lambda: 1) == Got(1)
    refused = attempt(refuse)
    absent = attempt(lambda: Path("/nowhere/file").read_text())
    broken = attempt(lambda: 1 // 0)
    assert isinstance(refused, Missed)
    assert refused.reason == f"{fault} {fault}"
    assert isinstance(absent, Missed)
    assert absent.reason == "/nowhere/file: No such file or directory"
    assert isinstance(broken, Missed)
    assert broken.reason == "ZeroDivisionError: integer division or modulo by zero"


def test_part_that_does_not_end_is_left_behind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    found = attempt_in_time((tmp_path / "pipe").read_text, 0.1)

    (tmp_path / "pipe").write_text("lets the thread end")
    assert found == Missed("not ready within 0.1 s")
    assert attempt_in_time(lambda: 2, 10.0) == Got(2)
