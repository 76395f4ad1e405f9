"""E2M1, E4M3, packing and block quantization in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from appliance.nvfp4 import block, e2m1, e4m3, packing
from appliance.nvfp4.block import Convention


def test_e2m1_encode_of_each_value_gives_its_code() -> None:
    codes = np.array([code for code in range(16) if code != 8], np.uint8)

    np.testing.assert_array_equal(e2m1.encode(e2m1.decode(codes)), codes)


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (100.0, 7)],
)
def test_e2m1_encode_of_ties_goes_to_the_even_code(value: float, code: int) -> None:
    values = np.array([value, -value], np.float32)

    # A negative value that rounds to zero keeps its sign.
    np.testing.assert_array_equal(e2m1.encode(values), [code, code | 8])


def test_e2m1_encode_of_negative_zero_gives_plain_zero() -> None:
    assert e2m1.encode(np.array([-0.0], np.float32))[0] == 0


def test_e4m3_encode_of_each_finite_value_gives_its_code() -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)

    np.testing.assert_array_equal(e4m3.encode(e4m3.decode(codes)), codes)


def test_e4m3_encode_saturates_and_keeps_nan() -> None:
    values = np.array([449, 1e30, np.inf, -np.inf, np.nan], np.float32)

    np.testing.assert_array_equal(e4m3.encode(values), [0x7E, 0x7E, 0x7E, 0xFE, 0x7F])


def test_legal_scales_are_the_finite_ones_without_sign() -> None:
    values = e4m3.decode(np.arange(256, dtype=np.uint8))

    legal = e4m3.is_legal_scale(np.arange(256, dtype=np.uint8))

    np.testing.assert_array_equal(legal, np.isfinite(values) & ~np.signbit(values))


@given(arrays(np.uint8, st.tuples(st.integers(1, 5), st.integers(1, 9))))
def test_pack_of_unpacked_bytes_gives_them_back(packed: np.ndarray) -> None:
    codes = packing.unpack(packed)

    assert codes.shape == (packed.shape[0], packed.shape[1] * 2)
    assert codes.max() <= 15
    np.testing.assert_array_equal(packing.pack(codes), packed)


def test_pack_puts_the_even_element_low_and_ascends_in_words() -> None:
    codes = np.arange(8, dtype=np.uint8)[np.newaxis]

    packed = packing.pack(codes)

    np.testing.assert_array_equal(packed, [[0x10, 0x32, 0x54, 0x76]])
    assert packed.view("<u4")[0, 0] == 0x76543210


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.zeros((1, 3), np.uint8), "even number of columns, got 3"),
        (np.array([[0, 16]], np.uint8), "codes from 0 to 15, got 16"),
    ],
)
def test_pack_of_what_is_no_codes_is_refused(codes: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packing.pack(codes)


@pytest.mark.parametrize("convention", Convention)
@pytest.mark.parametrize("size", [1e-6, 0.02, 50.0])
def test_round_trip_error_stays_within_the_format(convention: Convention, size: float) -> None:
    rng = np.random.default_rng(3)
    weight = (size * rng.standard_normal((32, 256))).astype(np.float32)

    values = block.round_to_nearest(weight, convention).dequantize()

    error = ((values - weight).astype(np.float64) ** 2).sum()
    assert error / (weight.astype(np.float64) ** 2).sum() < 0.0095


@pytest.mark.parametrize("convention", Convention)
def test_zero_blocks_and_zero_tensors_stay_zero_with_legal_scales(convention: Convention) -> None:
    weight = np.zeros((3, 32), np.float32)
    weight[1, :16] = 2

    for matrix in (weight, np.zeros_like(weight)):
        quantized = block.round_to_nearest(matrix, convention)

        assert e4m3.is_legal_scale(quantized.scales).all()
        assert np.isfinite(quantized.global_scale)
        np.testing.assert_allclose(quantized.dequantize(), matrix, rtol=1e-6)


def test_shared_global_is_used_as_given() -> None:
    weight = np.ones((2, 16), np.float32)
    shared = np.float32(1000)

    quantized = block.round_to_nearest(weight, Convention.COMPRESSED_TENSORS, shared_global=shared)

    assert quantized.global_scale == shared
    np.testing.assert_allclose(quantized.dequantize(), weight, rtol=0.07)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (np.zeros((1, 24), np.float32), "multiples of 16, got 24"),
        (np.full((1, 16), np.nan, np.float32), "finite weights"),
        (np.full((1, 16), np.inf, np.float32), "finite weights"),
    ],
)
def test_round_to_nearest_of_bad_matrices_is_refused(weight: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block.round_to_nearest(weight, Convention.MODELOPT)


@pytest.mark.parametrize("scales", [np.ones((2, 2)), np.ones((1, 3)), np.ones((1, 0)), np.ones(2)])
def test_dequantize_of_shapes_that_do_not_fit_is_refused(scales: np.ndarray) -> None:
    with pytest.raises(ValueError, match="scales"):
        block.dequantize(np.zeros((1, 16), np.uint8), scales.astype(np.float32))


def test_dequantize_without_globals_is_exact_in_fp16() -> None:
    codes = packing.pack(np.tile(np.arange(16, dtype=np.uint8), (127, 1)))
    scales = e4m3.decode(np.arange(127, dtype=np.uint8))[:, np.newaxis]

    values = block.dequantize(codes, scales)

    np.testing.assert_array_equal(values.astype(np.float16).astype(np.float32), values)
    assert values.max() == 2688
