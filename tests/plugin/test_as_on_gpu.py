"""What an engine on GPUs runs, in the real engine with the reference library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoint.read import summarize
from appliance.plan.split import Split
from appliance.plan.weights import WeightForm, weight_items

pytestmark = pytest.mark.engine

# A cached beginning of several blocks, a chunk, and single tokens.
PROMPTS = [[1, 5, 9, 100, 33, 7], list(range(3, 80)), [*range(3, 60), 4, 8], [3]]
MODELS = ("ct", "moe", "quasar", "moe-quasar", "moe-dense", "moe-fp8")
CALLED = (
    "nvfp4_attend",
    "nvfp4_matmul",
    "nvfp4_moe_down",
    "nvfp4_moe_gate_up",
    "nvfp4_moe_plan",
    "nvfp4_repack",
    "nvfp4_write_kv",
)

PACKED = WeightForm(element_bytes=4, packed=True)
"""As planned for GPUs, but for the FP32 of the CPU engine."""

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(models: Path, checkpoints: Any) -> Results:
    jobs = [
        {
            "name": name,
            "model": str(models / name / "model"),
            "twin": str(models / name / "twin"),
            "tp": 1,
            "prompts": PROMPTS,
            "tokens": 12,
        }
        for name in MODELS
    ]
    found: Results = checkpoints.run("as-on-gpu", jobs, timeout_s=900, script="as_on_gpu.py")
    return found


@pytest.mark.parametrize("name", MODELS)
def test_packed_weights_and_paged_attention_give_the_tokens_of_the_twin(
    results: Results, name: str
) -> None:
    result = results[name]

    assert result.get("error") is None
    assert result["tokens"] == result["twin"]


@pytest.mark.parametrize("name", MODELS)
def test_planned_weights_of_packed_layers_equal_what_is_held(
    results: Results, models: Path, name: str
) -> None:
    items = weight_items(summarize(models / name / "model"), Split(1, 1), 0, PACKED)

    assert sum(results[name]["ranks"][0].values()) == sum(item.bytes for item in items)


def test_packed_weights_are_held_at_their_stored_size(results: Results) -> None:
    matrices = results["ct"]["ranks"][0]
    packed = {name: size for name, size in matrices.items() if name.endswith("packed_weight")}

    assert len(packed) == 9
    assert "nvfp4.weights layers=9 stored_bytes=755712 " in results["ct"]["log"]
    assert f"bytes={sum(packed.values())}" in results["ct"]["log"]


def test_engine_called_the_library_for_everything(results: Results) -> None:
    (line,) = [line for line in results["ct"]["log"].splitlines() if line.startswith("calls [")]

    assert all(f"'{name}'" in line for name in CALLED)
