"""Dequantization of numpy arrays by the reference library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from appliance.nvfp4 import abi, block, e4m3, host
from appliance.nvfp4.library import LibraryError


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    return {
        "codes": rng.integers(0, 256, (5, 32), np.uint8),
        "scales": rng.integers(0, 0x7F, (5, 4), np.uint8),
        "row_globals": rng.uniform(1e-4, 1, 5).astype(np.float32),
    }


@pytest.mark.parametrize("is_divisor", [False, True])
def test_dequantize_equals_the_plain_form(
    arrays: dict[str, np.ndarray], *, is_divisor: bool
) -> None:
    out = np.empty((5, 64), np.float32)

    host.dequantize(**arrays, out=out, is_divisor=is_divisor)

    expected = block.dequantize(
        arrays["codes"],
        e4m3.decode(arrays["scales"]),
        arrays["row_globals"],
        is_divisor=is_divisor,
    )
    np.testing.assert_array_equal(out, expected)


def test_dequantize_unscaled_leaves_the_globals_out(arrays: dict[str, np.ndarray]) -> None:
    out = np.empty((5, 64), np.float16)

    host.dequantize(**arrays, out=out, flags=abi.Dequantize.UNSCALED)

    expected = block.dequantize(arrays["codes"], e4m3.decode(arrays["scales"]))
    np.testing.assert_array_equal(out, expected.astype(np.float16))


def test_dequantize_into_a_slice_writes_the_slice_only(arrays: dict[str, np.ndarray]) -> None:
    out = np.full((7, 80), 3, np.float32)

    host.dequantize(**arrays, out=out[1:6, :64])

    inside = np.zeros_like(out, np.bool_)
    inside[1:6, :64] = True
    assert (out[~inside] == 3).all()
    assert not (out[inside] == 3).all()


def test_dequantize_of_unaligned_codes_is_right(arrays: dict[str, np.ndarray]) -> None:
    raw = np.zeros(5 * 32 + 1, np.uint8)
    raw[1:] = arrays["codes"].reshape(-1)
    aligned, shifted = (np.empty((5, 64), np.float32) for _ in range(2))

    host.dequantize(**arrays, out=aligned)
    host.dequantize(**{**arrays, "codes": raw[1:].reshape(5, 32)}, out=shifted)

    np.testing.assert_array_equal(shifted, aligned)


def test_dequantize_of_bad_data_names_the_place_and_leaves_out_alone(
    arrays: dict[str, np.ndarray],
) -> None:
    arrays["scales"][3, 2] = 0xFF
    out = np.full((5, 64), 3, np.float32)

    with pytest.raises(LibraryError, match="row 3, block 2"):
        host.dequantize(**arrays, out=out)

    assert (out == 3).all()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("codes", np.zeros((5, 32), np.int8), "uint8 codes"),
        ("codes", np.zeros((4, 32), np.uint8), "equal rows"),
        ("codes", np.zeros((5, 64), np.uint8)[:, ::2], "rows contiguous"),
        ("scales", np.zeros((5, 4), np.float64), "known scales"),
        ("scales", np.zeros((5, 3), np.uint8), "divide 64 columns, got 3"),
        ("scales", np.zeros(5, np.uint8), "two matrices"),
        ("row_globals", np.ones(4, np.float32), r"float32 \[5\]"),
        ("row_globals", np.ones(5), r"float32 \[5\]"),
        ("row_globals", np.ones(10, np.float32)[::2], "contiguous globals"),
        ("out", np.zeros((5, 64)), "writeable float array"),
        ("out", np.zeros((5, 63), np.float32), "writeable float array"),
        ("out", np.broadcast_to(np.float32(0), (5, 64)), "writeable float array"),
    ],
)
def test_dequantize_of_arrays_that_do_not_fit_is_refused(
    name: str, value: Any, message: str, arrays: dict[str, Any]
) -> None:
    arguments = {**arrays, "out": np.zeros((5, 64), np.float32), name: value}

    with pytest.raises(ValueError, match=message):
        host.dequantize(**arguments)
