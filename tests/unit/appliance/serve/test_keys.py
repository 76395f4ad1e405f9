"""API keys from a file, and the rate of one key."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from appliance.serve.keys import KeyFile, RateLimit, parse_keys

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)
    os.utime(path, ns=(path.stat().st_mtime_ns + 10**9,) * 2)


def test_key_file_lines_are_keys_except_blank_ones_and_remarks() -> None:
    assert parse_keys("# team\n one \n\ntwo\none\n#three\n") == (b"one", b"two")


def test_key_file_admits_its_keys_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alpha\nbeta\n")
    keys = KeyFile(path, Clock())

    admitted = [keys.admits(key) for key in (b"alpha", b"beta", b"alph", b"", b"# x", b"\xff")]

    assert admitted == [True, True, False, False, False, False]


def test_key_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text("old\n")
    keys = KeyFile(path, clock)
    rewrite(path, "new\n")
    too_soon = keys.admits(b"new")

    clock.now = 2.0

    assert not too_soon
    assert keys.admits(b"new")
    assert not keys.admits(b"old")


def test_key_file_that_vanishes_keeps_its_last_keys(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text("old\n")
    keys = KeyFile(path, clock)
    path.unlink()

    clock.now = 2.0

    assert keys.admits(b"old")


def test_key_file_emptied_admits_nobody(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text("old\n")
    keys = KeyFile(path, clock)
    rewrite(path, "")

    clock.now = 2.0

    assert not keys.admits(b"old")
    assert not keys.admits(b"")


def test_rate_lets_a_minutes_worth_through_and_then_one_at_a_time() -> None:
    clock = Clock()
    rate = RateLimit(3, clock)
    burst = [rate.wait_s(b"key") for _ in range(4)]

    clock.now = 20.0
    after = [rate.wait_s(b"key") for _ in range(2)]

    assert burst[:3] == [0.0, 0.0, 0.0]
    assert burst[3] == pytest.approx(20.0)
    assert after == [0.0, pytest.approx(20.0)]


def test_rate_of_one_key_is_not_that_of_another() -> None:
    rate = RateLimit(1, Clock())
    rate.wait_s(b"one")

    assert rate.wait_s(b"two") == 0.0
    assert rate.wait_s(b"one") > 0.0


def test_rate_zero_is_no_limit() -> None:
    rate = RateLimit(0, Clock())

    assert {rate.wait_s(b"key") for _ in range(1000)} == {0.0}


def test_key_file_of_an_editor_with_a_byte_order_mark_admits_its_first_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfalpha\n")

    assert KeyFile(path, Clock()).admits(b"alpha")
