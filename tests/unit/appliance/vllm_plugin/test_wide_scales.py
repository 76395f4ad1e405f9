"""Groups of 128 with FP16 or FP32 scales: decoded, repacked and multiplied like groups of 16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from appliance.nvfp4 import abi, block
from appliance.vllm_plugin import kernel_ops, resident, weights
from appliance.vllm_plugin.canonical import Packed

ROWS, COLUMNS = 70, 256


def wide(kind: type[np.floating]) -> tuple[Packed, np.ndarray]:
    """Return random tensors of two parts, and the values they stand for."""
    generator = np.random.default_rng(5)
    codes = generator.integers(0, 256, (ROWS, COLUMNS // 2), dtype=np.uint8)
    scales = generator.uniform(0.01, 0.1, (ROWS, COLUMNS // 128)).astype(kind)
    factors = np.repeat(np.array([0.5, 3.0], np.float32), (30, 40))
    packed = Packed(
        torch.from_numpy(codes),
        torch.from_numpy(scales),
        torch.from_numpy(factors),
        False,
        (("first", 30), ("second", 40)),
    )
    return packed, block.dequantize(codes, scales.astype(np.float32), factors)


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_wide_scales_decode_to_the_oracles_values(kind: type[np.floating]) -> None:
    packed, expected = wide(kind)

    assert packed.group == 128
    np.testing.assert_array_equal(weights.dequantize_checked(packed, torch.float32), expected)
    np.testing.assert_array_equal(resident.decode(packed, torch.float32), expected)


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_wide_scales_multiply_packed(kind: type[np.floating]) -> None:
    packed, expected = wide(kind)
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(1))

    product = kernel_ops.linear(x, resident.pack(packed, abi.WeightKind.LINEAR), None)

    torch.testing.assert_close(product, x @ torch.from_numpy(expected).T, rtol=1e-4, atol=1e-3)
