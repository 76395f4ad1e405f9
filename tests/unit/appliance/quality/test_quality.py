"""The verb over real connections, and the arithmetic behind its figures."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.cli import main
from appliance.errors import ApplianceError
from appliance.quality.compare import check_baseline, compare, cumulated, divergence
from appliance.quality.job import load_baseline, read_key
from appliance.quality.measure import Served, read_text, window_of
from appliance.quality.measurement import Measurement, Window, load_measurement
from appliance.quality.prompts import PROMPTS, arithmetic_tasks, copy_tasks

Serve = Callable[..., Any]
Main = Callable[..., int]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"word{number} says {number * 7}" for number in range(400)))
    return path


@pytest.fixture
def quality(text: Path) -> Main:
    def run(url: str, out: Path, *words: str | Path) -> int:
        fixed = ("--text", str(text), "--letters", "200", "--pieces", "4")
        return main(["quality", "--url", url, "--out", str(out), *fixed, *map(str, words)])

    return run


def right_answers() -> dict[str, str]:
    tasks = (*copy_tasks(), *arithmetic_tasks())
    return {task.prompt: f" {task.answer}\nNumber" for task in tasks}


def measurement(*windows: Window, **changes: Any) -> Measurement:
    made = Measurement("m", {"top": 20}, windows, ("a",), (True,), (True,))
    return replace(made, **changes)


def test_quality_of_a_model_against_itself_finds_no_difference(
    serve: Serve, quality: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = serve(answers=right_answers())

    code = quality(model.url, tmp_path / "out", "--reference-url", model.url, "--json")

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (found["kl_mean"], found["top1_agreement"], found["answers_equal"]) == (0, 1, 1)
    assert (found["copied"], found["solved"]) == (1, 1)
    assert found["perplexity"] == found["perplexity_reference"] > 1
    assert (tmp_path / "out/quality.png").read_bytes().startswith(b"\x89PNG")
    assert len(model.requests) == 2 * (4 + len(PROMPTS) + 40)


def test_quality_perplexity_is_that_of_the_servers_distribution(
    serve: Serve, quality: Main, tmp_path: Path, text: Path
) -> None:
    model = serve()

    assert quality(model.url, tmp_path / "out") == 0

    total = count = 0.0
    for piece in read_text(text, letters=200, pieces=4).pieces:
        tokens = [ord(letter) % 40 for letter in piece]
        for one, two in itertools.pairwise(tokens):
            total += model.distribution(one)[two]
            count += 1
    stored = load_measurement(tmp_path / "out/measurement.json")
    assert stored.perplexity == pytest.approx(math.exp(-total / count))
    assert stored.copied == (False,) * 20


def test_quality_of_a_blurred_model_is_worse_and_told_in_a_table(
    serve: Serve, quality: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact, blurred = serve(), serve(name="blurred", blur=0.3)
    quality(exact.url, tmp_path / "exact")
    capsys.readouterr()

    code = quality(
        blurred.url, tmp_path / "out", "--reference", tmp_path / "exact/measurement.json"
    )

    found = json.loads((tmp_path / "out/quality.json").read_text())
    shown = capsys.readouterr().out
    assert code == 0
    assert found["kl_mean"] > 0.01
    assert found["kl_p99"] >= found["kl_mean"]
    assert "blurred" in shown
    assert "KL divergence" in shown


def test_quality_that_got_worse_than_the_baseline_ends_with_60_and_names_the_figures(
    serve: Serve, quality: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact, good, bad = serve(), serve(blur=0.05), serve(blur=0.6)
    reference = ("--reference", tmp_path / "exact/measurement.json")
    quality(exact.url, tmp_path / "exact")
    quality(good.url, tmp_path / "good", *reference)
    baseline = ("--baseline", tmp_path / "good/quality.json")

    same = quality(good.url, tmp_path / "again", *reference, *baseline)
    capsys.readouterr()
    worse = quality(bad.url, tmp_path / "bad", *reference, *baseline)

    errors = capsys.readouterr().err
    assert (same, worse) == (0, 60)
    assert "error[QUALITY_REGRESSION] kl_mean" in errors
    assert "error[QUALITY_REGRESSION] top1_agreement" in errors
    assert (tmp_path / "bad/quality.json").exists()


def test_quality_with_another_text_than_the_references_is_refused(
    serve: Serve, quality: Main, tmp_path: Path, text: Path
) -> None:
    model = serve()
    quality(model.url, tmp_path / "first")
    text.write_text("another " + text.read_text())

    code = quality(model.url, tmp_path / "out", "--reference", tmp_path / "first/measurement.json")

    assert code == 2
    assert not (tmp_path / "out/quality.json").exists()


@pytest.mark.parametrize("status", [400, 503])
def test_quality_of_a_server_that_refuses_shows_its_answer(
    serve: Serve,
    quality: Main,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    status: int,
) -> None:
    model = serve(status=status)

    code = quality(model.url, tmp_path / "out")

    assert code == 41
    assert f"HTTP {status}" in capsys.readouterr().err


def test_quality_without_a_server_or_with_unusable_files_says_so(
    serve: Serve, quality: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, junk = tmp_path / "out", tmp_path / "junk.json"
    junk.write_text('{"format": 1, "windows": [{"tokens": [1]}]}')
    model = serve()

    assert quality("http://127.0.0.1:1", out) == 41
    assert quality(model.url, out, "--reference", junk) == 2
    assert quality(model.url, out, "--reference-url", model.url, "--baseline", tmp_path / "no") == 2
    assert quality(model.url, out, "--baseline", junk) == 2
    assert quality(model.url, out, "--text", tmp_path / "absent") == 2
    assert capsys.readouterr().err.count("error[QUALITY_") == 5
    assert not out.exists()


def test_quality_sends_the_key_and_never_shows_it(
    serve: Serve, quality: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = serve(key="sesame-42")
    (tmp_path / "key").write_text("sesame-42\n")

    refused = quality(model.url, tmp_path / "out")
    allowed = quality(model.url, tmp_path / "out", "--api-key-file", tmp_path / "key")

    shown = capsys.readouterr()
    assert (refused, allowed) == (41, 0)
    assert "sesame" not in shown.out + shown.err
    assert "sesame" not in (tmp_path / "out/measurement.json").read_text()


def test_measurement_is_read_back_as_it_was(serve: Serve, text: Path, tmp_path: Path) -> None:
    served = Served(serve().url, model=None, key=None)
    window = served.predict(text.read_text()[:100])
    served.close()
    made = measurement(window)
    (tmp_path / "m.json").write_text(made.to_json())

    assert load_measurement(tmp_path / "m.json") == made
    assert len(window.tokens) == 99
    assert all(len(top) == 20 for top in window.top)


def test_window_takes_the_first_key_as_the_token_and_orders_the_rest_by_rank() -> None:
    entry = {
        "7": {"logprob": -5.0, "rank": 41},
        "3": {"logprob": -0.1, "rank": 1},
        "9": {"logprob": -3.0, "rank": 2},
    }

    window = window_of([entry])

    assert window == Window((7,), (-5.0,), (((3, -0.1), (9, -3.0)),))


@given(
    st.lists(st.floats(0.01, 1.0), min_size=4, max_size=12),
    st.lists(st.floats(0.01, 1.0), min_size=12, max_size=12),
    st.integers(1, 12),
)
def test_divergence_of_the_top_is_a_lower_bound_and_exact_for_all(
    first: list[float], second: list[float], top: int
) -> None:
    count = len(first)
    p = [value / sum(first) for value in first]
    q = [value / sum(second[:count]) for value in second[:count]]
    exact = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))

    def best(values: list[float], most: int) -> list[tuple[int, float]]:
        ranked = sorted(range(count), key=lambda each: -values[each])[:most]
        return [(each, math.log(values[each])) for each in ranked]

    assert divergence(best(p, top), best(q, top)) <= exact + 1e-9
    assert divergence(best(p, count), best(q, count)) == pytest.approx(exact, abs=1e-9)


def test_compare_of_other_tokens_is_refused() -> None:
    one = measurement(Window((1,), (-1.0,), (((1, -1.0),),)))
    two = measurement(Window((2,), (-1.0,), (((2, -1.0),),)))

    with pytest.raises(ApplianceError) as caught:
        compare(one, two)

    assert caught.value.faults[0].code == "QUALITY_INPUT"
    assert "the same model unquantized" in caught.value.faults[0].fix


@pytest.mark.parametrize(
    ("read", "content", "fix"),
    [
        (load_measurement, None, "name the measurement.json"),
        (load_measurement, "{}", "measure the reference again"),
        (load_baseline, None, "name the quality.json"),
        (load_baseline, "[", "store a new baseline"),
        (load_baseline, '{"format": 7}', "store a new baseline"),
        (read_key, None, "that you may read"),
        (read_key, "schlüssel", "in ASCII"),
        (read_key, "\nkey", "into its first line"),
        (lambda path: read_text(path, letters=9, pieces=1), None, "a text file that you may read"),
        (lambda path: read_text(path, letters=9, pieces=1), "short", "a longer text"),
    ],
)
def test_input_that_cannot_be_used_is_told_with_what_to_do_about_it(
    tmp_path: Path, read: Callable[[Path], object], content: str | None, fix: str
) -> None:
    path = tmp_path / "input"
    if content is not None:
        path.write_text(content)

    with pytest.raises(ApplianceError) as caught:
        read(path)

    [fault] = caught.value.faults
    assert fault.code == "QUALITY_INPUT"
    assert fix in fault.fix


def test_baseline_slack_is_kept_to_the_figure() -> None:
    window = Window((1,), (-1.0,), (((1, -1.0),),))
    found = compare(measurement(window), measurement(window))
    stored = found.to_json()

    check_baseline(found, stored | {"perplexity": found.perplexity / 1.0199}, "b")
    with pytest.raises(ApplianceError) as caught:
        check_baseline(found, stored | {"perplexity": found.perplexity / 1.0201}, "b")

    assert [fault.where for fault in caught.value.faults] == ["perplexity"]


def test_cumulated_ends_with_the_largest_and_repeats_no_point() -> None:
    points = cumulated([5.0, 1.0, 3.0], 60)

    assert points == [(0.0, 1.0), (50.0, 3.0), (100.0, 5.0)]


def test_prompts_are_thirty_and_tasks_have_distinct_right_answers() -> None:
    assert len(set(PROMPTS)) == 30
    assert len({task.prompt for task in copy_tasks()}) == 20
    assert all(6 <= len(task.answer) <= 12 and task.answer[0] != "0" for task in copy_tasks())
    for task in arithmetic_tasks():
        sum_text = task.prompt.rpartition("\n")[2].removesuffix(" =")
        one, sign, two = sum_text.split()
        assert int(task.answer) == int(one) + (int(two) if sign == "+" else -int(two)) >= 0
