"""The engine with the plugin gives the greedy tokens of the dequantized twin in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from appliance.checkpoint.read import summarize
from appliance.plan.split import Split
from appliance.plan.weights import WeightForm, weight_items

pytestmark = pytest.mark.engine

PROMPTS = [[1, 5, 9, 100, 33, 7], [4, 4, 8, 250, 499], [17] * 12, [3]]
TEXTS = (
    "The capital of France is",
    "Three primary colors are red,",
    "def add(a, b):\n    return",
    "Once upon a time, in a small village by the sea,",
)
SINGLE = (
    *("legacy", "modelopt", "ct", "mixed", "blocks", "quasar"),
    *("moe", "moe-ct", "moe-stacked", "moe-turned", "smollm2"),
    *("fp8", "fp8-channels", "fp8-blocks", "moe-fp8", "moe-fp8-stacked"),
    *("moe-dense", "moe-plain", "moe-quasar"),
)
DOUBLE = ("ct", "moe", "blocks", "quasar", "moe-stacked", "moe-fp8-stacked")
ASKED = dict.fromkeys(("moe-plain", "fp8", "fp8-blocks"), "nvfp4")
"""Models whose engine is told the method, as by a plan: one has no metadata to claim it by."""
FP32 = WeightForm(element_bytes=4, packed=False)

BAD_SCALE = "model.layers.1.self_attn.o_proj.weight_scale"

Results = dict[str, dict[str, Any]]


def job(root: Path, tp: int, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Return the job of one model against its twin."""
    return {
        "name": root.name,
        "model": str(root / "model"),
        "twin": str(root / "twin"),
        "tp": tp,
        "prompts": prompts,
        "tokens": tokens,
        "quantization": ASKED.get(root.name),
    }


@pytest.fixture(scope="module")
def roots(models: Path, smollm2: Path) -> dict[str, Path]:
    """Name of a model to the directory with its checkpoint and twin."""
    return {path.name: path for path in models.iterdir()} | {"smollm2": smollm2}


@pytest.fixture(scope="module")
def single(roots: dict[str, Path], checkpoints: Any) -> Results:
    """Results of one rank."""
    tokenizer = Tokenizer.from_file(str(roots["smollm2"] / "model" / "tokenizer.json"))
    texts = [tokenizer.encode(text).ids for text in TEXTS]
    jobs = [job(roots[name], 1, PROMPTS, 24) for name in SINGLE if name != "smollm2"]
    smollm2 = job(roots["smollm2"], 1, texts, 48) | {"name": "smollm2"}
    return checkpoints.run("single", [*jobs, smollm2], timeout_s=900)


@pytest.fixture(scope="module")
def double(
    roots: dict[str, Path], checkpoints: Any, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    """Results of two ranks, each a process of its own; one checkpoint has a bad scale."""
    damaged = tmp_path_factory.mktemp("damaged") / "model"
    config = json.loads((roots["ct"] / "model" / "config.json").read_text())
    tensors = checkpoints.read(roots["ct"] / "model")
    scales = tensors[BAD_SCALE].copy()
    scales.view(np.uint8)[100, 2] = 0x7F
    checkpoints.write(damaged, config, tensors | {BAD_SCALE: scales})
    bad = {"name": "damaged", "model": str(damaged), "tp": 2, "prompts": PROMPTS, "tokens": 1}
    jobs = [job(roots[name], 2, PROMPTS, 24) for name in DOUBLE]
    return checkpoints.run("double", [*jobs, bad], timeout_s=900)


@pytest.mark.parametrize("name", SINGLE)
def test_engine_one_rank_gives_the_tokens_of_the_twin(single: Results, name: str) -> None:
    result = single[name]

    assert result.get("error") is None
    assert result["tokens"] == result["twin"]


def test_engine_says_that_fused_parts_have_globals_of_their_own(single: Results) -> None:
    assert "code=I_FUSED_GLOBALS_DIFFER sites=" in single["ct"]["log"]


@pytest.mark.parametrize("name", DOUBLE)
def test_engine_two_ranks_give_the_tokens_of_the_twin(double: Results, name: str) -> None:
    result = double[name]

    assert result.get("error") is None
    assert result["tokens"] == result["twin"]


@pytest.mark.parametrize("name", SINGLE)
def test_planned_weights_one_rank_equal_what_the_model_holds(
    single: Results, roots: dict[str, Path], name: str
) -> None:
    planned = planned_bytes(roots[name] / "model", Split(1, 1), 0)

    assert sum(single[name]["ranks"][0].values()) == planned


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", DOUBLE)
def test_planned_weights_of_each_of_two_ranks_equal_what_it_holds(
    double: Results, roots: dict[str, Path], name: str, rank: int
) -> None:
    planned = planned_bytes(roots[name] / "model", Split(2, 1), rank)

    assert sum(double[name]["ranks"][rank].values()) == planned


def test_loaded_layers_report_their_bytes_in_one_line(single: Results) -> None:
    matrices = single["ct"]["ranks"][0]
    decoded = sum(size for name, size in matrices.items() if "_proj" in name or "lm_head" in name)

    assert f"nvfp4.weights layers=9 stored_bytes=755712 bytes={decoded}" in single["ct"]["log"]


def planned_bytes(model: Path, split: Split, rank: int) -> int:
    """Return what the plan says that one rank holds in weights on the CPU."""
    return sum(item.bytes for item in weight_items(summarize(model), split, rank, FP32))


def test_pruned_expert_is_named_in_a_warning(single: Results) -> None:
    expected = "nvfp4.zero_tensor code=W_ZERO_TENSOR name=model.layers.1.mlp.experts.6.up_proj"

    assert expected in single["moe"]["log"]


def test_bad_scale_ends_the_processes_of_the_engine_with_its_place(double: Results) -> None:
    result = double["damaged"]

    assert result["error"].startswith("RuntimeError: Engine core initialization failed")
    assert f"error[E_SCALE_NAN] {BAD_SCALE}: " in result["log"]
    assert "got NaN at row 100, block 2;" in result["log"]
