"""Stacks of square experts, which look the same either way round: the stack beside them tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.checkpoint.identity import identify
from appliance.checkpoint.stacks import lies_turned, stack_sizes
from appliance.checkpoint.tensors import open_tensors
from appliance.convert.job import Job, convert
from appliance.convert.target import Target
from appliance.nvfp4 import e4m3

Codes = Callable[[Path], list[str]]
Make = Callable[..., Any]

EXPERTS, HIDDEN = 3, 64
ROOT = "model.layers.0.mlp.experts"
GATE_UP, DOWN = f"{ROOT}.gate_up_proj", f"{ROOT}.down_proj"
GRAINS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")


@pytest.fixture
def stacked(edit: Callable[[str], Any], tmp_path: Path) -> Make:
    """Make a checkpoint whose experts are FP8 or dense stacks of one width, turned or not."""

    def make(width: int, algorithm: str, turned: str, hidden: int = HIDDEN) -> Any:
        made = edit("ok_moe_per_expert")
        made.root = tmp_path / f"{width}-{algorithm}-{turned}"
        made.legacy = None
        for name in [name for name in made.tensors if name.startswith(ROOT)]:
            del made.tensors[name]
        widen(made, hidden)
        made.config["moe_intermediate_size"] = width
        generator = np.random.default_rng(width)
        for leaf, (rows, columns) in stack_sizes(hidden, width).items():
            shape = (EXPERTS, rows, columns)
            if algorithm == "dense":
                kind, values = "BF16", generator.integers(0x3C00, 0x3E00, shape, dtype=np.uint16)
            else:
                kind, values = "F8_E4M3", generator.integers(0, 0x60, shape, dtype=np.uint8)
                scales = generator.uniform(0.01, 0.1, scale_shape(algorithm, rows, columns))
                scale_name = f"{ROOT}.{leaf}_weight_scale"
                made.tensors[scale_name] = ("F32", scales.astype(np.float32))
            stored = values.swapaxes(1, 2).copy() if leaf in turned else values
            made.tensors[f"{ROOT}.{leaf}"] = (kind, stored)
        state(made, algorithm)
        return made

    return make


def scale_shape(algorithm: str, rows: int, columns: int) -> tuple[int, ...]:
    blocks = (EXPERTS, -(-rows // 128), -(-columns // 128))
    return dict(zip(GRAINS, ((EXPERTS,), (EXPERTS, rows, 1), blocks), strict=True))[algorithm]


def widen(made: Any, hidden: int) -> None:
    """Make every other matrix dense, of the model's width."""
    packed = [name for name, (kind, _) in made.tensors.items() if kind == "U8"]
    for module in (name.removesuffix(".weight") for name in packed):
        rows, half = made.tensors[f"{module}.weight"][1].shape
        rows, columns = (hidden, half * 2) if module.endswith("o_proj") else (rows, hidden)
        made.dense(module, rows, columns)
    for name, (kind, array) in list(made.tensors.items()):
        is_wide = array.shape[-1:] == (HIDDEN,) and not name.endswith("o_proj.weight")
        if is_wide:
            shape = (*array.shape[:-1], hidden)
            made.tensors[name] = (kind, np.zeros(shape, array.dtype))
    made.config["hidden_size"] = hidden


def state(made: Any, algorithm: str) -> None:
    del made.config["quantization_config"]
    if algorithm != "dense":
        made.config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {ROOT: {"quant_algo": algorithm}},
        }


BOTH = "gate_up_proj down_proj"
SQUARES = {"down": HIDDEN, "gate and up": HIDDEN // 2}


@pytest.mark.parametrize("width", SQUARES.values(), ids=list(SQUARES))
@pytest.mark.parametrize("algorithm", GRAINS)
def test_square_stacks_have_the_values_of_upright_ones(
    stacked: Make, width: int, algorithm: str
) -> None:
    upright = stacked(width, algorithm, "").write()
    turned = stacked(width, algorithm, BOTH).write()

    expected, found = (identify(path).modules for path in (upright, turned))

    assert set(found) == {GATE_UP, DOWN}
    assert found == expected


@pytest.mark.parametrize("width", SQUARES.values(), ids=list(SQUARES))
def test_square_stacks_are_decoded_upright(stacked: Make, tmp_path: Path, width: int) -> None:
    upright = stacked(width, "FP8", "")
    turned = stacked(width, "FP8", BOTH).write()

    convert(Job(turned, tmp_path / "fp16", Target.FP16))

    with open_tensors(tmp_path / "fp16") as reader:
        for name in (GATE_UP, DOWN):
            codes = upright.tensors[name][1]
            assert reader.entry(name).shape == codes.shape
            scales = upright.tensors[f"{name}_weight_scale"][1].reshape(-1, 1, 1)
            expected = (e4m3.decode(codes) * scales.astype(np.float64)).astype(np.float32)
            np.testing.assert_array_equal(
                reader.array(name).view(np.float16), expected.astype(np.float16)
            )


@pytest.mark.parametrize("algorithm", ["dense", "FP8"])
@pytest.mark.parametrize(
    ("width", "turned"),
    [
        (HIDDEN, ""),
        (HIDDEN, BOTH),
        (HIDDEN // 2, BOTH),
        (48, ""),
        (48, BOTH),
        (48, "down_proj"),  # no square: each tells for itself
    ],
)
def test_stacks_are_read_either_way_round(
    stacked: Make, codes: Codes, algorithm: str, width: int, turned: str
) -> None:
    assert codes(stacked(width, algorithm, turned).write()) == []


@pytest.mark.parametrize(
    ("sizes", "turned", "wanted"),
    [
        ((256, 256), "", []),
        ((256, 256), BOTH, ["E_SCALE_SHAPE"]),  # 2 x 2 blocks of down
        ((128, 128), BOTH, []),  # one block of down, 2 x 1 of gate and up
        ((192, 256), BOTH, ["E_SCALE_SHAPE"]),  # 2 x 2 blocks of a matrix that is not square
    ],
)
def test_blocks_of_turned_stacks_must_show_which_way_round_they_lie(
    stacked: Make, codes: Codes, sizes: tuple[int, int], turned: str, wanted: list[str]
) -> None:
    width, hidden = sizes

    assert codes(stacked(width, "FP8_PB_WO", turned, hidden).write()) == wanted


@pytest.mark.parametrize("hidden", range(1, 9))
@pytest.mark.parametrize("width", range(1, 9))
def test_one_of_two_stacks_always_tells(hidden: int, width: int) -> None:
    sizes = stack_sizes(hidden, width)
    upright = {leaf: (EXPERTS, *size) for leaf, size in sizes.items()}
    turned = {leaf: (EXPERTS, *reversed(size)) for leaf, size in sizes.items()}

    assert upright != turned
    for leaf in sizes:
        assert not lies_turned(leaf, upright, sizes)
        assert lies_turned(leaf, turned, sizes)
