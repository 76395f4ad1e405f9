"""Our rounding gives the bits of both public tools, and E2M1 and E4M3 those of ml_dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

from appliance.nvfp4 import block, e2m1, e4m3
from appliance.nvfp4.block import Convention

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHAPES = ("1x16", "3x48", "5x160", "17x272", "33x1040", "64x128")
NAMES = {
    Convention.COMPRESSED_TENSORS: (".weight_packed", ".weight_scale", ".weight_global_scale"),
    Convention.MODELOPT: (".weight", ".weight_scale", ".weight_scale_2"),
}
CASES = [
    *((f"dense_ct_{shape}", "m", Convention.COMPRESSED_TENSORS) for shape in SHAPES),
    *((f"dense_modelopt_{shape}", "m", Convention.MODELOPT) for shape in SHAPES),
    ("rounding_ties", "ct", Convention.COMPRESSED_TENSORS),
    ("rounding_ties", "modelopt", Convention.MODELOPT),
    ("padded_k_modelopt", "m", Convention.MODELOPT),
]


@pytest.mark.parametrize(("name", "module", "convention"), CASES)
def test_round_to_nearest_gives_the_bits_of_the_tool(
    name: str,
    module: str,
    convention: Convention,
    vectors: Path,
    tensors_in: Callable[[str], dict[str, np.ndarray]],
) -> None:
    tensors = tensors_in(name)
    codes, scales, global_scale = (tensors[module + suffix] for suffix in NAMES[convention])
    source = np.load(vectors / f"{name}.npz")["source_fp32"]
    padding = -source.shape[1] % block.GROUP

    quantized = block.round_to_nearest(np.pad(source, ((0, 0), (0, padding))), convention)

    np.testing.assert_array_equal(quantized.codes, codes)
    np.testing.assert_array_equal(quantized.scales, scales)
    assert quantized.global_scale == global_scale.reshape(-1)[0]


def test_zero_tensor_of_compressed_tensors_gives_the_bits_of_the_tool(
    tensors_in: Callable[[str], dict[str, np.ndarray]],
) -> None:
    tensors = tensors_in("zero_tensor_ct")

    quantized = block.round_to_nearest(np.zeros((4, 32), np.float32), Convention.COMPRESSED_TENSORS)

    np.testing.assert_array_equal(quantized.codes, tensors["m.weight_packed"])
    np.testing.assert_array_equal(quantized.scales, tensors["m.weight_scale"])
    assert quantized.global_scale == tensors["m.weight_global_scale"][0]


def test_e2m1_values_equal_ml_dtypes() -> None:
    codes = np.arange(16, dtype=np.uint8)

    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)

    np.testing.assert_array_equal(e2m1.decode(codes).view(np.uint32), expected.view(np.uint32))


def test_e4m3_values_equal_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)

    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)

    np.testing.assert_array_equal(e4m3.decode(codes), expected)
    assert np.array_equal(np.signbit(e4m3.decode(codes)), np.signbit(expected))


def test_e4m3_encode_of_every_fp16_within_range_equals_ml_dtypes() -> None:
    halves = np.arange(0x10000, dtype=np.uint16).view(np.float16).astype(np.float32)
    values = halves[np.abs(halves) <= e4m3.MAXIMUM]

    expected = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    np.testing.assert_array_equal(e4m3.encode(values), expected)


def test_e2m1_encode_of_every_fp16_equals_ml_dtypes() -> None:
    halves = np.arange(0x10000, dtype=np.uint16).view(np.float16).astype(np.float32)
    values = halves[np.isfinite(halves) & ~((halves == 0) & np.signbit(halves))]

    saturated = np.clip(values, -e2m1.MAXIMUM, e2m1.MAXIMUM)
    expected = saturated.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)

    np.testing.assert_array_equal(e2m1.encode(values), expected)
