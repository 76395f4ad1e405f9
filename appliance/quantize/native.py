"""Binds libnvfp4_quant.so: the C ABI is kernels/quantize/nvfp4_quant.h."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 16
"""Weights that share one E4M3 scale."""

DTYPES = {"F16": 0, "BF16": 1, "F32": 2}
"""safetensors types that can be quantized, with their number in the ABI."""

LIBRARY = Path(__file__).parent.parent / "lib" / "libnvfp4_quant.so"

_ABI_VERSION = 2
_OUT_OF_RANGE = 3
_POINTER = ctypes.c_void_p


class Mode(StrEnum):
    """How the scale of a block is chosen."""

    FAST = "fast"  # the best E4M3 code of 17 around amax / 6
    RTN = "rtn"  # the E4M3 code nearest to amax / 6


_MODE_NUMBERS = {Mode.RTN: 0, Mode.FAST: 1}


@dataclass(frozen=True)
class Range:
    """What a scan found.

    Attributes:
        amax: Largest magnitude of the finite elements, 0 if there is none.
        non_finite: Number of NaN and infinite elements.
    """

    amax: float
    non_finite: int


@dataclass(frozen=True)
class Encoded:
    """One quantized matrix.

    Attributes:
        packed: uint8 [N, K/2], element 2j of a row in the low nibble of byte j.
        scales: uint8 [N, K/16], E4M3 codes; of groups uint16 [N, K/group], FP16 bits.
        squared_error: Sum of (weight - dequantized)^2.
        squared_weight: Sum of weight^2.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.uint8] | NDArray[np.uint16]
    squared_error: float
    squared_weight: float


def scan(weights: NDArray[Any], dtype: str, *, threads: int) -> Range:
    """Find the largest magnitude of a contiguous array and count what is not finite.

    Args:
        weights: Array of any shape as `TensorReader.array` gives it.
        dtype: `F16`, `BF16` or `F32`.
        threads: Threads to use, at least 1.
    """
    amax = ctypes.c_float()
    bad = ctypes.c_int64()
    status = _library().nvfp4_quant_scan(
        _address(weights, dtype),
        DTYPES[dtype],
        weights.size,
        threads,
        ctypes.byref(amax),
        ctypes.byref(bad),
    )
    _check(status)
    return Range(amax.value, bad.value)


def encode(
    weights: NDArray[Any], dtype: str, *, divisor: np.float32, mode: Mode, threads: int
) -> Encoded:
    """Quantize a matrix of finite weights; the result does not depend on `threads`.

    Args:
        weights: Contiguous [N, K], K a multiple of 16, as `TensorReader.array` gives it.
        dtype: `F16`, `BF16` or `F32`.
        divisor: The global scale: weight = e2m1 * e4m3 / divisor.
        mode: How block scales are chosen.
        threads: Threads to use, at least 1.
    """
    rows, columns = weights.shape
    packed = np.empty((rows, columns // 2), np.uint8)
    scales = np.empty((rows, columns // BLOCK), np.uint8)
    error = ctypes.c_double()
    energy = ctypes.c_double()
    status = _library().nvfp4_quant_encode(
        _address(weights, dtype),
        DTYPES[dtype],
        weights.size,
        divisor,
        _MODE_NUMBERS[mode],
        threads,
        packed.ctypes.data,
        scales.ctypes.data,
        ctypes.byref(error),
        ctypes.byref(energy),
    )
    _check(status)
    return Encoded(packed, scales, error.value, energy.value)


def scales(
    weights: NDArray[np.float32],
    *,
    divisor: np.float32,
    importance: NDArray[np.float32],
    threads: int,
) -> NDArray[np.uint8]:
    """Pick the E4M3 code of every block by a sweep whose errors are weighted by column.

    Args:
        weights: Contiguous [N, K], finite, K a multiple of 16.
        divisor: The global scale: weight = e2m1 * e4m3 / divisor.
        importance: [K], what a squared error in each column counts, >= 0.
        threads: Threads to use, at least 1.

    Returns:
        uint8 [N, K/16], E4M3 codes.
    """
    rows, columns = weights.shape
    codes = np.empty((rows, columns // BLOCK), np.uint8)
    counts = np.ascontiguousarray(importance, np.float32)
    if counts.shape != (columns,):
        raise ValueError(f"one importance a column ({columns}), got {counts.shape}")
    status = _library().nvfp4_quant_scales(
        _address(weights, "F32"),
        rows,
        columns,
        divisor,
        counts.ctypes.data,
        threads,
        codes.ctypes.data,
    )
    _check(status)
    return codes


def round_panel(
    weights: NDArray[np.float32],
    steps: NDArray[np.float32],
    factor: NDArray[np.float32],
    *,
    threads: int,
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Round columns one after the other, the later ones making up for the earlier (GPTQ).

    Args:
        weights: Contiguous [N, B], B at most 1024; holds the rounded values afterwards.
        steps: Contiguous [N, B], block scale / divisor of every weight.
        factor: Contiguous [B, B], the panel's square on the diagonal of the upper Cholesky factor
            of the inverse Hessian.
        threads: Threads to use, at least 1.

    Returns:
        uint8 [N, B], E2M1 codes; FP32 [N, B], what the columns after the panel must make up for:
        subtract its product with the panel's rows of the factor from them.
    """
    rows, width = weights.shape
    if steps.shape != weights.shape or factor.shape != (width, width):
        raise ValueError(f"steps {weights.shape}, a square factor; {steps.shape}, {factor.shape}")
    codes = np.empty((rows, width), np.uint8)
    errors = np.empty((rows, width), np.float32)
    status = _library().nvfp4_quant_panel(
        _address(weights, "F32"),
        _address(steps, "F32"),
        rows,
        width,
        _address(factor, "F32"),
        threads,
        codes.ctypes.data,
        errors.ctypes.data,
    )
    _check(status)
    return codes, errors


def encode_groups(weights: NDArray[np.float32], *, group: int, threads: int) -> Encoded | None:
    """Quantize groups of consecutive weights under one FP16 scale each, by squared error.

    Args:
        weights: Contiguous [N, K], finite, K a multiple of `group`.
        group: Weights of a group, a multiple of 16, at most 1024.
        threads: Threads to use, at least 1.

    Returns:
        Packed codes and scales uint16 [N, K/group] (FP16 bits); None if FP16 cannot hold a scale.
    """
    rows, columns = weights.shape
    packed = np.empty((rows, columns // 2), np.uint8)
    bits = np.empty((rows, columns // group), np.uint16)
    error, energy = ctypes.c_double(), ctypes.c_double()
    status = _library().nvfp4_quant_groups(
        _address(weights, "F32"),
        weights.size,
        group,
        threads,
        packed.ctypes.data,
        bits.ctypes.data,
        ctypes.byref(error),
        ctypes.byref(energy),
    )
    if status == _OUT_OF_RANGE:
        return None
    _check(status)
    return Encoded(packed, bits, error.value, energy.value)


def divisor_of(amax: float) -> np.float32:
    """Give the global divisor of a site whose largest magnitude is `amax`.

    2688 = 6 * 448 maps the largest weight onto the largest code under the largest scale. The
    order of operations is that of compressed-tensors (a reciprocal, then a product, both in FP32),
    so that the bits agree; an all-zero site, or one whose divisor would overflow, gets 1.
    """
    smallest = np.finfo(np.float32).tiny
    with np.errstate(over="ignore"):
        reciprocal = np.float32(1.0) / np.maximum(np.float32(amax), smallest)
        divisor = np.float32(reciprocal * np.float32(2688.0))
    return divisor if np.isfinite(divisor) else np.float32(1.0)


def _address(weights: NDArray[Any], dtype: str) -> int:
    if not weights.flags.c_contiguous or weights.itemsize != (4 if dtype == "F32" else 2):
        raise ValueError(f"a contiguous {dtype} array, got {weights.dtype} {weights.strides}")
    return int(weights.ctypes.data)


def _check(status: int) -> None:
    if status != 0:
        raise ValueError(f"libnvfp4_quant: status {status}")


_LETTERS = {"p": _POINTER, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float}
_SIGNATURES = {
    "nvfp4_quant_scan": "pilipp",
    "nvfp4_quant_encode": "pilfiipppp",
    "nvfp4_quant_scales": "pllfpip",
    "nvfp4_quant_panel": "ppllpipp",
    "nvfp4_quant_groups": "pliipppp",
}


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(LIBRARY))
        found = int(library.nvfp4_quant_abi_version())
    except (OSError, AttributeError) as error:
        raise _library_error("a shared library", str(error)[:160]) from None
    if found != _ABI_VERSION:
        raise _library_error(f"ABI version {_ABI_VERSION}", str(found))
    for name, words in _SIGNATURES.items():
        getattr(library, name).argtypes = [_LETTERS[letter] for letter in words]
    return library


def _library_error(what: str, value: str) -> ApplianceError:
    fault = Fault("LIBRARY_MISSING", str(LIBRARY), what, value, "build it with `make native`")
    return ApplianceError(ExitCode.USAGE, fault)
