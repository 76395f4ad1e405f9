"""Dequantization of numpy arrays by the reference library, as the CPU engine does it once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.nvfp4 import abi
from appliance.nvfp4.library import reference_library

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SCALE_TYPES = {
    np.dtype(np.uint8): abi.Type.E4M3,
    np.dtype(np.float16): abi.Type.F16,
    np.dtype(np.float32): abi.Type.F32,
}
_OUT_TYPES = {np.dtype(np.float16): abi.Type.F16, np.dtype(np.float32): abi.Type.F32}


def describe(
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    row_globals: NDArray[np.float32],
    *,
    is_divisor: bool,
) -> abi.Source:
    """Return the ABI's description of canonical arrays; the arrays must outlive it.

    Args:
        codes: uint8 [N, K / 2].
        scales: E4M3 bits (uint8), float16 or float32, [N, K / group].
        row_globals: float32 [N], contiguous: each part of a fused matrix keeps its own value.
        is_divisor: The globals divide; else they multiply.

    Raises:
        ValueError: If shapes or types do not belong together, or rows are not contiguous inside.
    """
    rows, columns = codes.shape[0], codes.shape[1] * 2
    if codes.ndim != 2 or scales.ndim != 2 or scales.shape[0] != rows:  # noqa: PLR2004 - a matrix
        raise ValueError(f"two matrices of equal rows, got {codes.shape} and {scales.shape}")
    if row_globals.shape != (rows,) or row_globals.dtype != np.float32:
        raise ValueError(f"float32 [{rows}], got {row_globals.dtype} {list(row_globals.shape)}")
    if codes.dtype != np.uint8 or scales.dtype not in _SCALE_TYPES:
        raise ValueError(f"uint8 codes and known scales, got {codes.dtype} and {scales.dtype}")
    blocks = scales.shape[1]
    if blocks == 0 or columns % blocks != 0:
        raise ValueError(f"scales that divide {columns} columns, got {blocks}")
    if not row_globals.flags.c_contiguous:
        raise ValueError("contiguous globals, got a strided view")
    return abi.Source(
        group=columns // blocks,
        scale_type=_SCALE_TYPES[scales.dtype],
        global_kind=abi.GlobalKind.DIVISOR if is_divisor else abi.GlobalKind.MULTIPLIER,
        n=rows,
        k=columns,
        codes=codes.ctypes.data,
        codes_stride=_row_stride(codes),
        scales=scales.ctypes.data,
        scales_stride=_row_stride(scales),
        globals=row_globals.ctypes.data,
    )


def dequantize(
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    row_globals: NDArray[np.float32],
    out: NDArray[Any],
    *,
    is_divisor: bool = False,
    flags: abi.Dequantize = abi.Dequantize.NONE,
) -> None:
    """Write the values of canonical arrays into `out`, on every CPU of this process.

    Args:
        codes: uint8 [N, K / 2].
        scales: E4M3 bits (uint8), float16 or float32, [N, K / group].
        row_globals: float32 [N].
        out: float32 or float16 [N, K], rows contiguous inside: the FP32 value nearest to the exact
            one, rounded once more for float16.
        is_divisor: The globals divide; else they multiply.
        flags: UNSCALED leaves the globals out.

    Raises:
        ValueError: If shapes or types do not belong together.
        LibraryError: NVFP4_ESCALE_NAN, NVFP4_ESCALE_NEGATIVE or NVFP4_EGLOBAL with row and block;
            `out` is unchanged then.
    """
    source = describe(codes, scales, row_globals, is_divisor=is_divisor)
    if out.shape != (source.n, source.k) or out.dtype not in _OUT_TYPES or not out.flags.writeable:
        raise ValueError(
            f"a writeable float array [{source.n}, {source.k}], got {out.dtype} {list(out.shape)}"
        )
    reference_library().dequantize_source(
        source,
        out.ctypes.data,
        out_type=_OUT_TYPES[out.dtype],
        out_stride=_row_stride(out),
        flags=flags,
    )


def _row_stride(array: NDArray[Any]) -> int:
    """Return the elements from row to row; the rows themselves must be contiguous."""
    rows, columns = array.shape
    if columns > 1 and array.strides[1] != array.itemsize:
        raise ValueError(f"rows contiguous inside, got strides {array.strides}")
    # A single row may carry any stride; the library wants one that is no shorter than the row.
    return columns if rows == 1 else array.strides[0] // array.itemsize
