"""The engine on a real GPU, and that its judge finds what does not hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER))

import engine_asks  # noqa: E402 - found through the line above
import engine_child  # noqa: E402 - likewise
import engine_delta  # noqa: E402 - likewise
import engine_faults  # noqa: E402 - likewise
import engine_models  # noqa: E402
import engine_serve  # noqa: E402 - likewise
import engine_stack  # noqa: E402 - likewise
import engine_upstream  # noqa: E402 - likewise
import run_engine  # noqa: E402 - likewise

from appliance.cli import main  # noqa: E402 - after what is found through the line above


def line(**changes: Any) -> dict[str, Any]:
    """What the twin says of one way, all well but for `changes`."""
    well = {"places": 8, "largest_gap": 0.0, "largest_logprob_difference": 0.0}
    return well | changes


def result(**changes: Any) -> dict[str, Any]:
    answer = {"tokens": [[1, 2], [3, 4]], "seconds": 1.0}
    ways = {"first": {"one": answer, "sixteen": {"tokens": answer["tokens"] * 2, "seconds": 0.5}}}
    return {"exit": 0, "ways": ways, "twin": {"first": line()}} | changes


TIMES = {kind: {"first_s": 0.7, "second_s": 0.3} for kind in engine_asks.KINDS}
LATE = {"top_p": {"first_s": 0.9, "second_s": 0.3}}
REFUSED = {"frequency_penalty": {"error": "HTTPError: 500"}}


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"equal": 15, "random": True}, True),
        ({"exit": 0}, False),
        ({"equal": 15}, False),
        ({"asked": TIMES | LATE}, False),
        ({"asked": TIMES | REFUSED}, False),
        ({"asked": {}}, False),
        ({"compiled_while_serving": ["_topk_topp_kernel"]}, False),
    ],
    ids=[
        "well",
        "unequal answers of random weights",
        "another exit",
        "unequal answers",
        "slow first request",
        "a kind that fails",
        "nothing asked",
        "compiled while serving",
    ],
)
def test_served_run_holds_only_with_all_of_it(changes: dict[str, Any], right: bool) -> None:
    well = {"exit": 41, "equal": 16, "asked": TIMES, "compiled_while_serving": []}

    assert engine_serve.holds(well | changes) is right


@pytest.mark.parametrize(
    ("kind", "answer", "right"),
    [
        ("json_schema", '{"name": "Ada", "sea": true}', True),
        ("json_schema", '{\n "na', True),
        ("json_schema", '{ "name" : "a b', True),
        ("json_schema", '{"name": "Ada", "sea": 1}', False),
        ("json_schema", '{"name": "Ada"}', False),
        ("json_schema", "Once upon a time", False),
        ("json_schema", "", False),
        ("choice", "maybe", False),
        ("regex", "sea", True),
        ("regex", "Sea", False),
        ("stop", "in a village", False),
        ("stream", "data: {}\n\n", False),
        ("greedy", "", False),
    ],
)
def test_answers_of_a_kind_are_judged_by_what_was_asked(
    kind: str, answer: str, right: bool
) -> None:
    assert (engine_asks.judged(kind, [answer]) == {}) is right


def test_kernels_compiled_while_serving_are_those_after_readiness() -> None:
    said = "WARNING Triton kernel JIT compilation during inference: {}. This causes"
    log = [
        said.format("canarys"),
        "INFO serve.ready url=x",
        said.format("users"),
        said.format("users"),
    ]

    assert engine_serve.compiled_while_serving("\n".join(log)) == ["users"]


def test_faults_of_what_holds_are_none() -> None:
    operations = {"exit": 0, "linear": {"bad": {}, "largest": 1e-4}}

    assert engine_faults.faults({"dense": result(), "operations": operations}) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"exit": -9}, "dense: exit -9"),
        ({"twin": {"first": line(largest_gap=0.2)}}, "dense, first: a gap of 0.2"),
        ({"twin": {"first": line(largest_gap=float("nan"))}}, "dense, first: a gap of nan"),
        (
            {"twin": {"first": line(largest_logprob_difference=0.3)}},
            "dense, first: a log-probability that is 0.3 off",
        ),
        ({"ways": {"first": {"error": "RuntimeError: no"}}}, "dense, first: RuntimeError: no"),
        ({"ways": {"first": {"growth_bytes": 512}}}, "dense: 512 bytes more after a thousand"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_faults_name_what_does_not_hold(changes: dict[str, Any], said: str) -> None:
    (found,) = engine_faults.faults({"dense": result(**changes)})

    assert found.startswith(said)


def answered(*tokens: int) -> dict[str, Any]:
    return {"one": {"tokens": [list(tokens)]}}


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("dense", {"twin": None}, "dense, first: nobody judged it"),
        ("dense", {"twin": {"first": line(places=0)}}, "dense, first: nobody judged it"),
        ("dense", {"ways": {}, "twin": {}}, "dense: no way was run"),
        (
            "long",
            {"ways": {"a": answered(1, 2), "b": answered(1, 3)}},
            "long, b: other answers than a",
        ),
        ("long", {"ways": {"a": {}}}, "long, a: other answers than a"),
        (
            "dense",
            {
                "ways": {"one card": answered(1), "pipeline parallel 2": answered(2)},
                "twin": {"one card": line(), "pipeline parallel 2": line()},
            },
            "dense, pipeline parallel 2: other answers than one card",
        ),
    ],
    ids=["no twin", "no places", "no ways", "chunks differ", "no answers", "stages differ"],
)
def test_faults_name_what_nobody_compared_or_what_differs(
    name: str, found: dict[str, Any], said: str
) -> None:
    assert engine_faults.faults({name: result() | found}) == [said]


def test_faults_of_nothing_are_told() -> None:
    assert engine_faults.faults({}) == ["nothing was run"]


def test_largest_of_values_with_one_that_is_no_number_is_none() -> None:
    assert engine_child.largest([0.1, float("nan"), 0.2]) != engine_child.largest([0.1])
    assert str(engine_child.largest([0.1, float("nan"), 0.2])) == "nan"
    assert engine_child.largest([0.1, 0.3]) == 0.3


def test_model_that_nobody_makes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run_engine.py", "--only", "dense", "typo"])

    with pytest.raises(SystemExit, match=r"--only: dense, .*; got typo"):
        run_engine.jobs(run_engine.parse())


def test_faults_of_a_hybrid_name_layers_that_triton_computed() -> None:
    kernels = ["_compute_slot_mapping_kernel", "batch_memcpy_kernel", "_causal_conv1d_fwd_kernel"]

    found = engine_faults.faults(
        {"hybrid": result(triton=kernels), "dense": result(triton=kernels)}
    )

    assert found == ["hybrid: Triton computed _causal_conv1d_fwd_kernel"]


def test_checks_of_gated_delta_networks_compare_what_a_batch_and_a_sequence_alone_give() -> None:
    counts, made = engine_delta.BATCHES["mixed"], engine_delta.layer(335, (2, 6, 64))
    whole, host = engine_delta.batch(counts, engine_delta.CPU), made.on(engine_delta.CPU)
    together = host.run(whole).split(counts)

    for at, (begin, count) in enumerate(zip(whole.query_start.tolist(), counts, strict=False)):
        rows = slice(begin, begin + count)
        alone = replace(made, qkvz=made.qkvz[rows], ba=made.ba[rows]).on(engine_delta.CPU)
        step = engine_delta.batch([count], engine_delta.CPU)
        step.slots[0], step.carried[0] = whole.slots[at], whole.carried[at]
        assert engine_delta.far(alone.run(step), together[at]) < 1e-3
        assert engine_delta.far(alone.state[step.slots], host.state[step.slots]) < 1e-3


def test_faults_of_an_operation_name_its_case() -> None:
    operations = {"exit": 0, "linear": {"bad": {"1x2": 0.5}}}

    assert engine_faults.faults({"operations": operations}) == ["operations linear: {'1x2': 0.5}"]


def small_stack() -> dict[str, Any]:
    """The stack's config with one narrow layer."""
    small = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    return engine_stack.QWEN2_14B | small | {"num_attention_heads": 4, "num_key_value_heads": 2}


def stack_of(**read: list[float]) -> dict[str, Any]:
    """Ways of the stack by what they read; one named coarse rounds its activations."""
    answer = {"tokens": [[5]], "seconds": 1.0}
    ways = {
        name: {"one": answer, "read": said, "coarse": name == "coarse"}
        for name, said in read.items()
    }
    return {"exit": 0, "ways": ways}


READ = [-2.0, -9.0, -4.0, -7.0]


def test_ways_of_the_stack_that_are_apart_are_told_and_not_timed() -> None:
    found = stack_of(fused=READ, dequantized=[-2.0, -9.3, -4.0, -7.0])

    (wrong,) = engine_faults.faults({"stack": found})

    assert wrong == "stack, dequantized: a log-probability that is 0.300 off"
    assert "one_ms_a_step" not in run_engine.agreement(found, timed=False)["ways"]["fused"]
    near = stack_of(fused=READ, dequantized=[-2.04, -9.0, -4.0, -7.0])
    assert engine_faults.faults({"stack": near}) == []


@pytest.mark.parametrize(
    ("read", "said"),
    [
        ({}, "stack: no way was runstack: nothing to hold the ways against"),
        ({"fused": [float("nan")] * 4}, "stack: nothing to hold the ways against"),
        ({"fused": READ, "dequantized": []}, "stack, dequantized: it read no log-probabilities"),
        ({"fused": READ, "coarse": [-2.5, -8.0, -4.4, -6.0]}, ""),
        (
            {"fused": READ, "coarse": [-5.0, -4.0, -6.0, -5.5]},
            "stack, coarse: log-probabilities that correlate by -0.",
        ),
    ],
    ids=["no ways", "not numbers", "one read nothing", "rounded inputs", "other numbers"],
)
def test_stack_needs_something_to_compare(read: dict[str, list[float]], said: str) -> None:
    found = "".join(engine_faults.faults({"stack": stack_of(**read)}))

    assert found.startswith(said)
    assert bool(found) == bool(said)


@pytest.mark.parametrize(
    ("other", "said"), [(4, []), (5, ["dense, a: the twin's token in 3 of 8"])]
)
def test_way_that_rounds_activations_says_the_twins_token_half_of_the_time(
    other: int, said: list[str]
) -> None:
    twin = {"a": line(largest_gap=3.0, largest_logprob_difference=2.0) | {"other_token": other}}
    ways = {"a": {"coarse": True}}

    found = engine_faults.faults({"dense": {"exit": 0, "ways": ways, "twin": twin}})

    assert [each.removesuffix(" places") for each in found] == said


def test_copy_for_upstream_says_that_activations_are_rounded_and_has_their_scales(
    tmp_path: Path,
) -> None:
    tiny = engine_models.maker()
    engine_stack.write(tiny, tmp_path / "model", small_stack())

    engine_upstream.write(tmp_path / "model", tmp_path / "upstream")

    copied = tiny.read_checkpoint(tmp_path / "upstream")
    plain = tiny.read_checkpoint(tmp_path / "model")
    scales = {key for key in plain if key.endswith("weight_global_scale")}
    assert scales
    for key in scales:
        inputs = copied[key.replace("weight_global", "input_global")]
        assert inputs.tolist() == [engine_upstream.INPUT_GLOBAL]
    config = json.loads((tmp_path / "upstream" / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    assert group["input_activations"]["num_bits"] == 4
    assert json.loads((tmp_path / "model" / "config.json").read_text()) != config


@pytest.mark.parametrize("name", engine_models.FORMATS)
def test_model_of_every_format_is_made_with_its_twin(tmp_path: Path, name: str) -> None:
    engine_models.make(name, tmp_path)

    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert (tmp_path / "twin" / "model.safetensors").is_file()


def test_stack_holds_weights_as_large_as_a_trained_models(tmp_path: Path) -> None:
    tiny = engine_models.maker()

    engine_stack.write(tiny, tmp_path / "model", small_stack())
    tiny.write_twin(tmp_path / "model", tmp_path / "twin")

    weights = tiny.read_checkpoint(tmp_path / "twin")
    down = weights["model.layers.0.mlp.down_proj.weight"]
    assert down.shape == (256, 512)
    assert (down**2).sum(axis=1).mean() == pytest.approx(1.0, rel=0.05)
    assert main(["model", "digest", str(tmp_path / "model")]) == 0


def test_agreement_counts_equal_answers_and_times_steps() -> None:
    other = {"tokens": [[1, 2], [3, 9], [1, 2], [3, 9]], "seconds": 0.1}
    found = result()
    found["ways"]["second"] = {"one": {"tokens": [[1, 2], [3, 9]], "seconds": 2.0}}
    found["ways"]["second"]["sixteen"] = other

    ways = run_engine.agreement(found)["ways"]

    assert (ways["first"]["one"], ways["first"]["sixteen"]) == ("2/2 equal", "4/4 equal")
    assert (ways["second"]["one"], ways["second"]["sixteen"]) == ("1/2 equal", "2/4 equal")
    assert ways["second"]["one_ms_a_step"] == 500.0
    assert ways["second"]["sixteen_ms_a_step"] == 50.0


def test_every_way_of_a_job_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["--custom", "--long"], ["--pair"], ["--steps"], []):
        monkeypatch.setattr(sys, "argv", ["run_engine.py", *words, "--model", "real=folder"])
        for job in run_engine.jobs(run_engine.parse()):
            names = [way["name"] for way in job["ways"]]
            assert len(set(names)) == len(names)


@pytest.mark.gpu
@pytest.mark.slow
def test_engine_on_this_machine_agrees_with_the_dequantized_twin(tmp_path: Path) -> None:
    words = [sys.executable, str(FOLDER / "run_engine.py"), "--custom", "--checks"]
    done = subprocess.run(
        [*words, "--work", str(tmp_path / "work")],
        capture_output=True,
        text=True,
        env={**os.environ, "OUT": str(tmp_path)},
        check=False,
    )

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
