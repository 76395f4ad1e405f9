"""What a configuration says of FP8 weights, held against the tensors: blocks, type, one scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.checkpoint.read import summarize
from appliance.errors import ApplianceError

Edit = Callable[[str], Any]
Codes = Callable[[Path], list[str]]

LAYER = "model.layers.0"
Q = f"{LAYER}.self_attn.q_proj"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WHOLE = {"quant_method": "fp8"}
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
ALGORITHMS = {
    "tensor": "FP8",
    "channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "block": "FP8_PB_WO",
}
GRAINS = list(ALGORITHMS)


def compressed(strategy: str, **fields: object) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy} | fields
    return {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


@pytest.fixture
def fp8(edit: Edit) -> Callable[[dict[str, Any], str], Any]:
    """Make a checkpoint of FP8 alone, with a scale for each block, row or matrix."""

    def make(quantization: dict[str, Any], grain: str) -> Any:
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
            blocks = tuple(-(-size // 128) for size in shape)
            counts = {"tensor": (), "channel": (shape[0], 1), "block": blocks}[grain]
            suffix = "weight_scale_inv" if grain == "block" else "weight_scale"
            made.tensors[f"{module}.{suffix}"] = ("F32", np.ones(counts, np.float32))
        return made

    return make


@pytest.mark.parametrize(
    ("quantization", "grain"),
    [
        (BLOCKS, "block"),
        (BLOCKS | {"fmt": "e4m3"}, "block"),
        (WHOLE, "tensor"),
        (WHOLE, "channel"),
        (WHOLE | {"weight_block_size": None}, "tensor"),
        *[(MODELOPT | {"quant_algo": ALGORITHMS[grain]}, grain) for grain in GRAINS],
        *[(compressed(grain), grain) for grain in GRAINS],
    ],
)
def test_fp8_scales_as_stated_are_taken(
    fp8: Any, codes: Codes, quantization: dict[str, Any], grain: str
) -> None:
    assert codes(fp8(quantization, grain).write()) == []


@pytest.mark.parametrize(
    ("quantization", "grain"),
    [
        (BLOCKS, "tensor"),
        (BLOCKS, "channel"),
        (WHOLE, "block"),
        *[
            (quantization, grain)
            for stated in GRAINS
            for grain in GRAINS
            if grain != stated
            for quantization in (MODELOPT | {"quant_algo": ALGORITHMS[stated]}, compressed(stated))
        ],
    ],
)
def test_fp8_scales_that_are_not_as_stated_are_refused(
    fp8: Any, codes: Codes, quantization: dict[str, Any], grain: str
) -> None:
    assert set(codes(fp8(quantization, grain).write())) == {"E_SCALE_SHAPE"}


@pytest.mark.parametrize("stated", GRAINS)
@pytest.mark.parametrize("grain", GRAINS)
def test_fp8_of_one_module_is_held_against_its_own_scheme(
    fp8: Any, codes: Codes, stated: str, grain: str
) -> None:
    odd = f"{LAYER}.mlp.up_proj"
    made = fp8(MODELOPT, "channel")
    modules = [
        name.removesuffix(".weight")
        for name, (kind, _) in made.tensors.items()
        if kind == "F8_E4M3"
    ]
    schemes = {module: {"quant_algo": ALGORITHMS["channel"]} for module in modules}
    schemes[odd] = {"quant_algo": ALGORITHMS[stated]}
    made.config["quantization_config"] = MODELOPT | {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": schemes,
    }
    shape = {"tensor": (1,), "channel": (192,), "block": (2, 1)}[grain]
    made.tensors[f"{odd}.weight_scale"] = ("F32", np.ones(shape, np.float32))

    assert codes(made.write()) == ([] if grain == stated else ["E_SCALE_SHAPE"])


def test_message_names_module_file_and_both_statements(fp8: Any) -> None:
    root = fp8(MODELOPT | {"quant_algo": "FP8"}, "channel").write()

    with pytest.raises(ApplianceError) as caught:
        summarize(root)

    fault = next(each for each in caught.value.faults if each.where == f"{Q}.weight_scale")
    rows = fault.value.partition("[")[2].partition(",")[0]
    assert fault.what == (
        f"a scale, one for the matrix, since {root / 'config.json'} quantization_config says FP8"
    )
    assert fault.value == f"F32 [{rows}, 1], a scale, one for each row"


@pytest.mark.parametrize("other", [None, "FP8_PB_WO", "NVFP4"])
def test_two_lists_of_schemes_that_differ_are_refused(
    fp8: Any, codes: Codes, other: str | None
) -> None:
    made = fp8(MODELOPT, "channel")
    modules = [
        name.removesuffix(".weight")
        for name, (kind, _) in made.tensors.items()
        if kind == "F8_E4M3"
    ]
    schemes = {module: {"quant_algo": ALGORITHMS["channel"]} for module in modules}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": schemes}
    made.config["quantization_config"] = MODELOPT | mixed
    made.legacy = {"quantization": mixed}
    assert codes(made.write()) == []

    del schemes[Q]
    if other is not None:
        schemes = schemes | {Q: {"quant_algo": other}}
    made.legacy = {"quantization": mixed | {"quantized_layers": schemes}}
    made.config["quantization_config"]["quantized_layers"] = {
        module: {"quant_algo": ALGORITHMS["channel"]} for module in modules
    }

    assert codes(made.write()) == ["E_CONFIG_CONFLICT"]


@pytest.mark.parametrize("size", [[64, 64], "x", 128, {}, [128]])
def test_fp8_blocks_of_another_size_are_refused(fp8: Any, codes: Codes, size: object) -> None:
    made = fp8(WHOLE | {"weight_block_size": size}, "block")

    assert codes(made.write()) == ["E_GROUP_SIZE"]


def test_fp8_of_another_type_is_refused(fp8: Any, codes: Codes) -> None:
    assert codes(fp8(BLOCKS | {"fmt": "e5m2"}, "block").write()) == ["E_UNSUPPORTED_ALGO"]


def test_fp8_module_with_two_scales_is_refused(fp8: Any, codes: Codes) -> None:
    made = fp8(WHOLE, "tensor")
    made.tensors[f"{Q}.weight_scale_inv"] = ("F32", np.ones((), np.float32))

    assert codes(made.write()) == ["E_UNKNOWN_TENSOR"]


@pytest.mark.parametrize(("size", "wanted"), [("128x128", []), ("64x64", ["E_GROUP_SIZE"])])
def test_block_structure_may_be_a_text(
    fp8: Any, codes: Codes, size: str, wanted: list[str]
) -> None:
    made = fp8(compressed("block", block_structure=size), "block")

    assert codes(made.write()) == wanted
