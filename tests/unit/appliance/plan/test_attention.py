"""Which attention an engine on GPUs gets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from appliance.checkpoint.summary import Geometry
from appliance.plan.attention import HEAD_SIZES, REASONS, attention_backend, unproved


def geometry(size: int, heads: int = 8, groups: int = 2) -> Geometry:
    return Geometry("QwenForCausalLM", "qwen", 2, 2, 0, 64, 96, heads, groups, size, 100, 64, False)


@pytest.mark.parametrize("size", HEAD_SIZES)
def test_attention_backend_of_compiled_heads_is_the_appliance_s(size: int) -> None:
    assert attention_backend(geometry(size)) == "CUSTOM"


@pytest.mark.parametrize("size", [32, 80, 96, 112, 192, 512])
def test_attention_backend_of_other_heads_is_named_with_its_cost(size: int) -> None:
    backend = attention_backend(geometry(size))

    assert backend == "TRITON_ATTN"
    assert "without tensor cores" in REASONS[backend]


def test_plan_and_library_have_the_same_heads() -> None:
    header = (Path(__file__).parents[4] / "kernels/include/nvfp4_attention.h").read_text()
    stated = re.search(r"int64_t head_dim;\s*/\* ([\d, ]+);", header)

    assert stated is not None
    assert tuple(map(int, stated[1].split(","))) == HEAD_SIZES


def test_recurrent_layers_on_a_gpu_are_told_to_be_unproved() -> None:
    (sentence,) = unproved(48, "auto")

    assert sentence.startswith("48 recurrent layers ")
    assert unproved(48, "cpu") == unproved(0, "cuda") == []
