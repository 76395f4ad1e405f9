"""The C parts of calibration against plain numpy: weighted sweep and GPTQ's pass over a panel."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.quantize.native import divisor_of, encode_groups, round_panel, scales

E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def rounded(values: np.ndarray) -> np.ndarray:
    """The nearest E2M1 values, by the type of another library."""
    return np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)


def weighted_errors(block: np.ndarray, importance: np.ndarray, divisor: float) -> np.ndarray:
    """Weighted squared error of a block [16] under every code but 0, which is left infinite."""
    steps = E4M3[1:, None] / divisor
    lost = rounded(block / steps) * steps - block
    return np.concatenate(([np.inf], (importance * lost**2).sum(1)))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_scales_are_the_best_of_the_window_under_the_weighted_error(
    rows: int, blocks: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.standard_t(4, (rows, 16 * blocks)).astype(np.float32)
    importance = rng.exponential(1, 16 * blocks).astype(np.float32)
    divisor = divisor_of(float(np.abs(weights).max()))

    codes = scales(weights, divisor=divisor, importance=importance, threads=1)

    for row in range(rows):
        for at in range(blocks):
            span = slice(16 * at, 16 * at + 16)
            block = weights[row, span].astype(np.float64)
            errors = weighted_errors(block, importance[span].astype(np.float64), float(divisor))
            nearest = int(np.abs(E4M3 - np.abs(block).max() / 6 * float(divisor)).argmin())
            window = range(max(1, nearest - 8), min(126, nearest + 6) + 1)
            assert errors[codes[row, at]] <= min(errors[code] for code in window) * (1 + 1e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_round_panel_equals_the_plain_loop(rows: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.normal(0, 1, (rows, width)).astype(np.float32)
    steps = rng.uniform(0.1, 0.5, (rows, width)).astype(np.float32)
    factor = np.triu(rng.normal(0, 0.2, (width, width)), 1) + np.diag(rng.uniform(1, 2, width))
    factor = factor.astype(np.float32)
    left, expected = weights.copy(), np.empty_like(weights)
    carried = np.empty_like(weights)
    for column in range(width):
        step = steps[:, column]
        expected[:, column] = rounded(left[:, column] / step).astype(np.float32) * step
        carried[:, column] = (left[:, column] - expected[:, column]) / factor[column, column]
        for later in range(column + 1, width):
            left[:, later] -= carried[:, column] * factor[column, later]

    codes, errors = round_panel(weights, steps, factor, threads=2)

    np.testing.assert_array_equal(weights, expected)
    np.testing.assert_array_equal(errors, carried)
    values = np.where(codes & 8, -1, 1) * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
    np.testing.assert_array_equal((values * steps).astype(np.float32), expected)


def test_calibration_calls_with_shapes_that_do_not_belong_together_are_refused() -> None:
    weights = np.zeros((2, 32), np.float32)
    with pytest.raises(ValueError, match="importance"):
        scales(weights, divisor=np.float32(1), importance=np.zeros(16, np.float32), threads=1)
    with pytest.raises(ValueError, match="square"):
        round_panel(weights, weights.copy(), np.eye(31, dtype=np.float32), threads=1)
    wide = np.ones((1, 1040), np.float32)
    with pytest.raises(ValueError, match="status"):
        round_panel(wide, wide.copy(), np.eye(1040, dtype=np.float32), threads=1)
    with pytest.raises(ValueError, match="status"):
        scales(weights, divisor=np.float32(0), importance=np.ones(32, np.float32), threads=1)
    with pytest.raises(ValueError, match="status"):
        encode_groups(weights, group=24, threads=1)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e4))
def test_group_scales_are_fp16_numbers_and_never_lose_more_than_amax_over_six(
    seed: int, size: float
) -> None:
    weights = (np.random.default_rng(seed).standard_t(3, (2, 128)) * size).astype(np.float32)
    weights = np.clip(weights, -3e5, 3e5)

    encoded = encode_groups(weights, group=128, threads=1)

    assert encoded is not None
    stored = encoded.scales.view(np.float16).astype(np.float64)
    assert np.isfinite(stored).all()
    lost = 0.0
    for row in range(2):
        plain = float(np.float16(np.abs(weights[row]).max() / 6))
        lost += float(((rounded(weights[row] / plain) * plain - weights[row]) ** 2).sum())
    assert encoded.squared_error <= lost * (1 + 1e-3)
