"""Hybrids of the Qwen3.5 family give the greedy tokens of their twins in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from modules import module_at

from appliance.checkpoint.read import summarize
from appliance.plan.split import Split
from appliance.plan.weights import WeightForm, weight_items

pytestmark = pytest.mark.engine

# Decodes beside chunks of prompts, a prompt of one token, and two that begin alike for a block.
PROMPTS = [[1, 5, 9, 100, 33, 7], list(range(3, 80)), [17] * 12, [3]]
LONG = [[*range(3, 140), 4, 8], [*range(3, 140), 250], [*range(200, 320)], [*range(100, 220)]]
TOKENS = 48
HERE = Path(__file__).parent
TEXT_ONLY = {"language_model_only": True}
SERVED = {
    "next": {"max_num_batched_tokens": 16},
    # Chunks of half a block, one prompt after the other: the second begins with a kept state.
    "seeing": TEXT_ONLY
    | {"max_num_batched_tokens": 64, "enable_prefix_caching": True, "max_num_seqs": 1},
    # Nine blocks: two long sequences find no tenth, and one begins again in the other's slots.
    "odd-rows": {"num_gpu_blocks_override": 10, "block_size": 128},
}
"""As on GPUs: the options of each model's engine."""
CALLED = ("nvfp4_causal_conv", "nvfp4_gated_delta", "nvfp4_gated_rms_norm", "nvfp4_rms_norm")
FP32 = WeightForm(element_bytes=4, packed=False)

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def hybrid_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of tiny hybrids; each has `model` and `twin` below its name."""
    root = tmp_path_factory.mktemp("hybrids")
    producers, hybrids = (module_at(HERE / f"{stem}.py") for stem in ("producers", "hybrids"))
    packed = producers.COMPRESSED_TENSORS
    hybrids.make_hybrid(producers, root / "ct", packed)
    # The gates quantized as well: 12 rows of a fused matrix, 6 on each of two ranks.
    hybrids.make_hybrid(producers, root / "odd-rows", packed, kept=("embed_tokens",))
    hybrids.make_hybrid(producers, root / "next", packed, config=hybrids.NEXT)
    modelopt, seeing = producers.MODELOPT, hybrids.SEEING
    hybrids.make_hybrid(producers, root / "seeing", modelopt, config=seeing, mtp=True)
    return root


def job(root: Path, model: str, prompts: list[list[int]], **others: Any) -> dict[str, Any]:
    """Return the job of one model against its twin."""
    paths = {kind: str(root / model / kind) for kind in ("model", "twin")}
    return {"name": model, **paths, "tp": 1, "prompts": prompts, "tokens": TOKENS} | others


@pytest.fixture(scope="module")
def plain(hybrid_models: Path, checkpoints: Any) -> Results:
    """Results of the CPU engine; the last job asks for guesses ahead."""
    jobs = [job(hybrid_models, "ct", PROMPTS)]
    jobs.append(job(hybrid_models, "ct", PROMPTS, name="upstream", dtype="bfloat16"))
    guess = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    options = TEXT_ONLY | guess
    jobs.append(job(hybrid_models, "seeing", PROMPTS, name="guessing", options=options))
    found: Results = checkpoints.run("hybrid", jobs, timeout_s=900)
    return found


@pytest.fixture(scope="module")
def served(hybrid_models: Path, checkpoints: Any) -> Results:
    """Results of what an engine on GPUs runs, with the reference library."""
    jobs = [
        job(hybrid_models, name, PROMPTS if name == "next" else LONG, options=options)
        for name, options in SERVED.items()
    ]
    found: Results = checkpoints.run("gpu", jobs, timeout_s=900, script="as_on_gpu.py")
    return found


@pytest.fixture(scope="module")
def double(hybrid_models: Path, checkpoints: Any) -> Results:
    """Results of two ranks, each as on a GPU."""
    jobs = [job(hybrid_models, "odd-rows", PROMPTS, tp=2)]
    found: Results = checkpoints.run("double", jobs, timeout_s=900, script="as_on_gpu.py")
    return found


def test_engine_gives_the_tokens_of_the_twin(plain: Results) -> None:
    result = plain["ct"]

    assert result.get("error") is None
    assert result["tokens"] == result["twin"]


def test_upstreams_layer_in_its_only_type_agrees_but_for_rounding(plain: Results) -> None:
    result = plain["upstream"]

    assert result.get("error") is None
    answers = zip(result["tokens"], result["twin"], strict=True)
    agreed = sum(token == right for both in answers for token, right in zip(*both, strict=True))
    assert agreed >= 0.85 * len(PROMPTS) * TOKENS


@pytest.mark.parametrize("name", SERVED)
def test_engine_as_on_gpus_gives_the_tokens_of_the_twin(served: Results, name: str) -> None:
    result = served[name]

    assert result.get("error") is None
    assert result["tokens"] == result["twin"]


def test_engine_on_two_ranks_gives_the_tokens_of_the_twin(double: Results) -> None:
    result = double["odd-rows"]

    assert result.get("error") is None
    assert result["tokens"] == result["twin"]


def test_two_ranks_hold_packed_weights(double: Results) -> None:
    for rank in double["odd-rows"]["ranks"]:
        assert sum(name.endswith("packed_weight") for name in rank) == 20


def test_second_prompt_begins_with_the_state_that_the_first_left(served: Results) -> None:
    assert served["seeing"]["cached"] == [0, 128, 0, 0]


def test_engine_called_the_library_for_every_layer(served: Results) -> None:
    (line,) = [line for line in served["next"]["log"].splitlines() if line.startswith("calls [")]

    assert all(f"'{name}'" in line for name in CALLED)
    assert "'preempted'" in line


def test_guesses_ahead_are_refused_by_name(plain: Results) -> None:
    assert "error[E_SPECULATIVE] speculative-config: " in plain["guessing"]["error"]


def test_planned_weights_equal_what_the_model_holds(plain: Results, hybrid_models: Path) -> None:
    summary = summarize(hybrid_models / "ct" / "model")
    planned = sum(item.bytes for item in weight_items(summary, Split(1, 1), 0, FP32))

    assert sum(plain["ct"]["ranks"][0].values()) == planned
