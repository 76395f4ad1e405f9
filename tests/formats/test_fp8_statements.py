"""What a configuration says of FP8 weights, held against the tensors: blocks, type, one scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Edit = Callable[[str], Any]
Codes = Callable[[Path], list[str]]

LAYER = "model.layers.0"
Q = f"{LAYER}.self_attn.q_proj"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WHOLE = {"quant_method": "fp8"}
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}


@pytest.fixture
def fp8(edit: Edit) -> Callable[[dict[str, Any], bool], Any]:
    """Make a checkpoint of FP8 alone, with a scale for each block or for each matrix."""

    def make(quantization: dict[str, Any], is_block: bool) -> Any:
        made = edit("ok_modelopt_w4a4")
        made.legacy = None
        made.config["quantization_config"] = quantization
        made.config["intermediate_size"] = 192  # two blocks, so that shapes tell
        hidden = made.config["hidden_size"]
        packed = [name for name, (kind, _) in made.tensors.items() if kind == "U8"]
        for module in (name.removesuffix(".weight") for name in packed):
            rows, half = made.tensors[f"{module}.weight"][1].shape
            shape = (rows, half * 2)
            if ".mlp." in module:
                shape = (hidden, 192) if module.endswith("down_proj") else (192, hidden)
            made.drop(module)
            made.tensors[f"{module}.weight"] = ("F8_E4M3", np.full(shape, 0x38, np.uint8))
            counts = tuple(-(-size // 128) for size in shape) if is_block else ()
            suffix = "weight_scale_inv" if is_block else "weight_scale"
            made.tensors[f"{module}.{suffix}"] = ("F32", np.ones(counts, np.float32))
        return made

    return make


@pytest.mark.parametrize(
    ("quantization", "is_block"),
    [
        (BLOCKS, True),
        (BLOCKS | {"fmt": "e4m3"}, True),
        (WHOLE, False),
        (WHOLE | {"weight_block_size": None}, False),
        (MODELOPT | {"quant_algo": "FP8_PB_WO"}, True),
        (MODELOPT | {"quant_algo": "FP8"}, False),
    ],
)
def test_fp8_scales_as_stated_are_taken(
    fp8: Any, codes: Codes, quantization: dict[str, Any], is_block: bool
) -> None:
    assert codes(fp8(quantization, is_block).write()) == []


@pytest.mark.parametrize(
    ("quantization", "is_block"),
    [
        (BLOCKS, False),
        (WHOLE, True),
        (MODELOPT | {"quant_algo": "FP8_PB_WO"}, False),
    ],
)
def test_fp8_scales_that_are_not_as_stated_are_refused(
    fp8: Any, codes: Codes, quantization: dict[str, Any], is_block: bool
) -> None:
    assert codes(fp8(quantization, is_block).write()) == ["E_SCALE_SHAPE"]


@pytest.mark.parametrize("size", [[64, 64], "x", 128, {}, [128]])
def test_fp8_blocks_of_another_size_are_refused(fp8: Any, codes: Codes, size: object) -> None:
    made = fp8(WHOLE | {"weight_block_size": size}, True)

    assert codes(made.write()) == ["E_GROUP_SIZE"]


def test_fp8_of_another_type_is_refused(fp8: Any, codes: Codes) -> None:
    assert codes(fp8(BLOCKS | {"fmt": "e5m2"}, True).write()) == ["E_UNSUPPORTED_ALGO"]


def test_fp8_module_with_two_scales_is_refused(fp8: Any, codes: Codes) -> None:
    made = fp8(WHOLE, False)
    made.tensors[f"{Q}.weight_scale_inv"] = ("F32", np.ones((), np.float32))

    assert codes(made.write()) == ["E_UNKNOWN_TENSOR"]


@pytest.mark.parametrize(("size", "wanted"), [("128x128", []), ("64x64", ["E_GROUP_SIZE"])])
def test_block_structure_may_be_a_text(
    fp8: Any, codes: Codes, size: str, wanted: list[str]
) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": size}
    made = fp8(
        {
            "quant_method": "compressed-tensors",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        },
        True,
    )

    assert codes(made.write()) == wanted
