"""The canonical values of quantized matrices: FP32 nearest to the exact product, row slab by slab.

They are the identity of the weights whatever layout holds them. Every value that no kernel may see
is refused here as it is while serving.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from appliance.checkpoint.faults import refuse
from appliance.checkpoint.stored import FP8_BLOCK, NVFP4_GROUP, QUASAR_GROUP, Layout, Stored
from appliance.checkpoint.values import (
    check_fp8,
    check_largest,
    check_powers,
    check_values,
    has_codes,
    scale_facts,
)
from appliance.nvfp4 import block, e2m1, e4m3, host, mxfp4
from appliance.nvfp4.library import LibraryError, reference_library

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from appliance.checkpoint.tensors import TensorReader

_SLAB_ELEMENTS: Final = 1 << 20
_AGAIN: Final = "export the checkpoint again"
_OFFSET_VALUES: Final = np.arange(-8, 8, dtype=np.float32)


@dataclass(frozen=True)
class Matrix:
    """One quantized matrix, or a stack of them, ready to be decoded.

    Attributes:
        stored: Which tensors it is made of.
        codes: Packed E2M1 codes, uint8 [..., N, K / 2], or E4M3 bits, uint8 [..., N, K].
        scales: As stored: E4M3, E8M0 bits, float16 or float32.
        factors: Globals as stored, float32 [1] or one for each matrix of the stack; None without.
        columns: Input features without the padding of the packed tensor.
        offset_codes: Codes are integers 0 to 15 around 8 (`int4_offset8`) instead of E2M1.
    """

    stored: Stored
    codes: NDArray[np.uint8]
    scales: NDArray[Any]
    factors: NDArray[np.float32] | None
    columns: int
    offset_codes: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded values, outermost first."""
        return (*self.codes.shape[:-1], self.columns)

    @property
    def zeros(self) -> int:
        """How many matrices their producer stored as all zero.

        Raises:
            ApplianceError: As `slabs`.
        """
        if self.stored.layout in (Layout.FP8, Layout.MXFP4):
            return 0
        return sum(_is_zero(self, index) for index in range(len(_stack(self.codes))))

    def slabs(self) -> Iterator[NDArray[np.float32]]:
        """Give the values [rows, K] slab by slab, stack by stack.

        Raises:
            ApplianceError: E_SCALE_NAN, E_SCALE_NEGATIVE, E_GLOBAL_INVALID or E_GLOBAL_DIRECTION.
        """
        if self.stored.layout is Layout.FP8:
            yield from _fp8_slabs(self)
            return
        for index, (codes, scales) in enumerate(
            zip(_stack(self.codes), _stack(self.scales), strict=True)
        ):
            yield from _fp4_slabs(self, index, codes, scales)

    def values(self) -> NDArray[np.float32]:
        """Return every value at once; see `slabs`."""
        return np.concatenate(list(self.slabs())).reshape(self.shape)


def open_matrix(
    reader: TensorReader,
    stored: Stored,
    shape: tuple[int, ...] | None = None,
    *,
    is_turned: bool = False,
) -> Matrix:
    """View the tensors of one quantized matrix.

    Args:
        reader: The checkpoint.
        stored: Which tensors.
        shape: Rows and columns (after experts) as the model has them; tells padding, and packed
            stacks that lie turned. None takes the tensors as they are.
        is_turned: A stack of FP8 has input features before output features.

    Raises:
        ApplianceError: E_SHAPE, E_SCALE_SHAPE or E_SCALE_DTYPE if the tensors do not belong
            together.
    """
    codes, scales = reader.array(stored.codes), reader.array(stored.scales)
    if stored.layout is Layout.QUASAR:
        codes = _words_as_bytes(stored, codes)
    if is_turned or (shape is not None and _is_transposed(codes, scales, shape)):
        codes = np.ascontiguousarray(codes.swapaxes(-1, -2))
        if stored.layout is not Layout.FP8:  # scales of FP8 rows stay as they are
            scales = np.ascontiguousarray(scales.swapaxes(-1, -2))
    if codes.dtype != np.uint8 or codes.ndim not in (2, 3) or codes.size == 0:
        value = f"{codes.dtype} {list(codes.shape)}"
        raise refuse("E_SHAPE", stored.codes, "codes of a matrix or a stack", value, _AGAIN)
    factors = None
    if stored.factor is not None:
        factors = reader.float32(stored.factor).reshape(-1)
    width = codes.shape[-1] * (1 if stored.layout is Layout.FP8 else 2)
    matrix = Matrix(stored, codes, scales, factors, width if shape is None else shape[-1])
    _check(matrix, width)
    return matrix


def _words_as_bytes(stored: Stored, words: NDArray[Any]) -> NDArray[np.uint8]:
    if words.dtype.itemsize != 4 or words.ndim != 2:  # noqa: PLR2004 - 32-bit words of a matrix
        value = f"{words.dtype} {list(words.shape)}"
        raise refuse("E_SHAPE", stored.codes, "I32 [N, K / 8]", value, _AGAIN)
    return np.ascontiguousarray(words).view(np.uint8)


def _is_transposed(codes: NDArray[Any], scales: NDArray[Any], shape: tuple[int, ...]) -> bool:
    """Tell whether packed codes have input features before output features, as in older exports."""
    *lead, rows, columns = shape
    upright = (*lead, rows, columns // 2), (*lead, rows, columns // NVFP4_GROUP)
    turned = (*lead, columns // 2, rows), (*lead, columns // NVFP4_GROUP, rows)
    # Codes alone do not tell where rows are half of the columns; the scales then do.
    return (codes.shape, scales.shape) == turned and turned != upright


def _check(matrix: Matrix, width: int) -> None:
    stored, codes, scales = matrix.stored, matrix.codes, matrix.scales
    if stored.layout is Layout.FP8:
        _fp8_scales(matrix)
        return
    groups = {
        Layout.QUASAR: (NVFP4_GROUP if scales.dtype == np.uint8 else QUASAR_GROUP,),
        Layout.MXFP4: (mxfp4.GROUP,),
    }.get(stored.layout, (NVFP4_GROUP,))
    wanted = [(*codes.shape[:-1], width // group) for group in groups]
    if scales.shape not in wanted or width % groups[0]:
        value = str(list(scales.shape))
        raise refuse("E_SCALE_SHAPE", stored.scales, str(list(wanted[0])), value, _AGAIN)
    if stored.layout is not Layout.QUASAR and scales.dtype != np.uint8:
        raise refuse("E_SCALE_DTYPE", stored.scales, "8 bits", str(scales.dtype), _AGAIN)
    count = len(_stack(codes))
    if matrix.factors is not None and len(matrix.factors) not in (1, count):
        what, value = f"one number for each of {count} matrices", str(len(matrix.factors))
        raise refuse("E_SCALE_SHAPE", str(stored.factor), what, value, _AGAIN)


def _stack(array: NDArray[Any]) -> NDArray[Any]:
    return array if array.ndim == 3 else array[np.newaxis]  # noqa: PLR2004 - experts first


def _factor(matrix: Matrix, index: int) -> float | None:
    if matrix.factors is None:
        return None
    return float(matrix.factors[index if len(matrix.factors) > 1 else 0])


def _is_zero(matrix: Matrix, index: int) -> bool:
    stored = matrix.stored
    many = len(_stack(matrix.codes)) > 1
    joined = "_" if many else "."
    factor = _factor(matrix, index)
    return check_values(
        f"{stored.module} expert {index}" if many else stored.module,
        scale_facts(_stack(matrix.scales)[index]),
        factor,
        scales=_part(stored.scales, joined),
        globals_=_part(stored.factor or "", joined),
        divisor=stored.is_divisor,
        no_codes=factor == 0.0 and not has_codes(_stack(matrix.codes)[index]),
    )


def _part(name: str, joined: str) -> str:
    """Return the part of a tensor's name: behind the last dot, or the name of a stacked tensor."""
    return name.rpartition(".")[2] if joined in name else name


def _fp4_slabs(
    matrix: Matrix, index: int, codes: NDArray[np.uint8], scales: NDArray[Any]
) -> Iterator[NDArray[np.float32]]:
    factor = _factor(matrix, index)
    is_zero = False
    if matrix.stored.layout is Layout.MXFP4:
        check_powers(matrix.stored.scales, scales)
    else:
        is_zero = _is_zero(matrix, index)
    rows, width = codes.shape[0], matrix.columns
    step = max(1, _SLAB_ELEMENTS // max(1, width))
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        if is_zero:
            yield np.zeros((len(codes[part]), width), np.float32)
            continue
        decoded = _decoded(matrix, codes[part], scales[part], factor)
        yield np.ascontiguousarray(decoded[:, :width])


def _decoded(
    matrix: Matrix, codes: NDArray[np.uint8], scales: NDArray[Any], factor: float | None
) -> NDArray[np.float32]:
    """Decode rows by the reference library, which is six times as fast, or without it in numpy."""
    is_divisor = matrix.stored.is_divisor
    factors = np.full(len(codes), 1.0 if factor is None else factor, np.float32)
    if not matrix.offset_codes and matrix.stored.layout is not Layout.MXFP4 and has_library():
        out = np.empty((len(codes), codes.shape[1] * 2), np.float32)
        host.dequantize(codes, scales, factors, out, is_divisor=is_divisor)
        return out
    return block.dequantize(
        codes,
        _scale_values(matrix.stored.layout, scales),
        factors,
        is_divisor=is_divisor,
        table=_OFFSET_VALUES if matrix.offset_codes else e2m1.VALUES,
    )


@functools.cache
def has_library() -> bool:
    """Tell whether the reference library is built and loads; both ways give the same bits."""
    try:
        reference_library()
    except LibraryError:
        return False
    return True


def _scale_values(layout: Layout, scales: NDArray[Any]) -> NDArray[np.float32]:
    if layout is Layout.MXFP4:
        return mxfp4.decode_scales(scales).astype(np.float32)
    return e4m3.decode(scales) if scales.dtype == np.uint8 else scales.astype(np.float32)


def _fp8_scales(matrix: Matrix) -> NDArray[np.float32]:
    """Return the scales of E4M3 weights as one for each row and column block, [E, N, blocks].

    One a matrix, one a row, or one for each 128 x 128 block: the shape says which.
    """
    codes, scales = _stack(matrix.codes), matrix.scales
    if scales.dtype == np.uint16:  # BF16 as its bits
        scales = (scales.astype(np.uint32) << np.uint32(16)).view(np.float32)
    scales = scales.astype(np.float32)
    count, rows, columns = codes.shape
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    lead = (count,) if matrix.codes.ndim == 3 else ()  # noqa: PLR2004 - experts first
    if scales.size == 1 or scales.shape in {lead, (*lead, 1), (*lead, 1, 1)}:
        spread = np.broadcast_to(scales.reshape(-1, 1, 1), (count, rows, 1))
    elif scales.shape in {(*lead, rows), (*lead, rows, 1)}:
        spread = scales.reshape(count, rows, 1)
    elif scales.shape in {(*lead, *blocks), (*lead, blocks[0], 1, blocks[1], 1)}:
        spread = np.repeat(scales.reshape(count, *blocks), FP8_BLOCK, axis=1)[:, :rows]
    else:
        what = f"one scale, one for each of {rows} rows, or {list(blocks)} for blocks of 128 x 128"
        value = str(list(scales.shape))
        raise refuse("E_SCALE_SHAPE", matrix.stored.scales, what, value, _AGAIN)
    return spread


def _fp8_slabs(matrix: Matrix) -> Iterator[NDArray[np.float32]]:
    scales = _fp8_scales(matrix)
    columns = matrix.codes.shape[-1]
    step = max(1, _SLAB_ELEMENTS // columns)
    for index, codes in enumerate(_stack(matrix.codes)):
        check_fp8(matrix.stored.module, codes, scales[index])
        for begin in range(0, len(codes), step):
            part = slice(begin, begin + step)
            spread = scales[index, part].astype(np.float64)
            if spread.shape[1] > 1:
                spread = np.repeat(spread, FP8_BLOCK, axis=1)[:, :columns]
            # An E4M3 value times an FP32 scale has at most 28 bits: FP64 holds it exactly.
            exact = e4m3.decode(codes[part]).astype(np.float64) * spread
            check_largest(matrix.stored.scales, float(np.abs(exact).max(initial=0.0)))
            yield exact.astype(np.float32)
