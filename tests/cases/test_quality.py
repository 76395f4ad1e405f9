"""Reported wrong answers that only a second way of computing shows, by the id of the case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.cli import main

Serve = Callable[..., Any]


@pytest.fixture
def same_model(serve: Serve, tmp_path: Path) -> Callable[[float], int]:
    """Compare a model with itself computed another way; `blur` is what the other way adds."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word{number} says {number * 7}" for number in range(200)))

    def run(blur: float) -> int:
        one, other = serve(name="quasar"), serve(name="quasar", blur=blur)
        words = ("--url", other.url, "--reference-url", one.url, "--text", str(text))
        sizes = ("--letters", "200", "--pieces", "2", "--out", str(tmp_path / "out"))
        return main(["quality", *words, *sizes, "--same-model"])

    return run


@pytest.mark.parametrize("blur", [0.0, 0.002], ids=["equal", "rounding"])
def test_rc_034_rc_036_two_ways_that_differ_by_rounding_are_the_same(
    same_model: Callable[[float], int], blur: float
) -> None:
    assert same_model(blur) == 0


def test_rc_034_rc_036_two_ways_that_diverge_end_with_60_and_ask_for_the_copies(
    same_model: Callable[[float], int], capsys: pytest.CaptureFixture[str]
) -> None:
    code = same_model(0.6)

    said = capsys.readouterr().err
    assert code == 60
    assert "error[QUALITY_DIVERGES] kl_mean: at most 0.005 nats, got " in said
    assert "copies between the GPUs" in said


@pytest.mark.parametrize("value", [float("nan"), None])
def test_rc_033_rc_034_way_that_computes_no_numbers_ends_with_60(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float | None
) -> None:
    model = serve()
    healthy = model.entry
    model.entry = lambda *words: {
        token: entry | {"logprob": value} for token, entry in healthy(*words).items()
    }
    (tmp_path / "text.txt").write_text("some words " * 40)
    words = ("--url", model.url, "--text", str(tmp_path / "text.txt"))

    code = main(["quality", *words, "--letters", "200", "--pieces", "1", "--out", str(tmp_path)])

    assert code == 60
    assert "error[NUMERIC_NAN] " in capsys.readouterr().err


def test_rc_036_comparison_needs_something_to_compare_with(tmp_path: Path) -> None:
    words = ("--url", "http://127.0.0.1:1", "--text", "t", "--out", str(tmp_path), "--same-model")

    assert main(["quality", *words]) == 2
