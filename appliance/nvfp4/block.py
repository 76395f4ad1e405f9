"""Block quantization in numpy: the plain form of what the kernels and the quantizer do fast.

`round_to_nearest` gives the same bits as compressed-tensors 0.20.1 and nvidia-modelopt 0.47.0; the
order of its FP32 operations is theirs, so it must not be simplified.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import numpy as np

from appliance.nvfp4 import e2m1, e4m3, packing

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP: Final = 16
"""Elements of K that share a block scale in standard NVFP4."""

_ONE: Final = np.float32(1)
_ZERO_BLOCK_DIVISOR: Final = np.float32(0.125)  # compressed-tensors: the eps of E4M3
_SMALLEST_SCALE: Final = np.float32(2**-9)  # ModelOpt clamps to the smallest subnormal
_RANGE: Final = np.float32(e2m1.MAXIMUM * e4m3.MAXIMUM)  # 2688


class Convention(StrEnum):
    """Whose names, whose meaning of the global scale, and whose rounding."""

    COMPRESSED_TENSORS = "compressed-tensors"  # the global is a divisor
    MODELOPT = "modelopt"  # the global is a multiplier


@dataclass(frozen=True)
class Quantized:
    """A matrix in canonical NVFP4.

    Attributes:
        codes: uint8 [N, K / 2], element 2j in the low nibble of byte j.
        scales: E4M3 bits, uint8 [N, K / 16].
        global_scale: Multiplier or divisor, by the convention.
        convention: Which of the two.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    global_scale: np.float32
    convention: Convention

    def dequantize(self) -> NDArray[np.float32]:
        """Return the FP32 values [N, K] nearest to the exact ones."""
        rows = np.full(self.codes.shape[0], self.global_scale, dtype=np.float32)
        is_divisor = self.convention is Convention.COMPRESSED_TENSORS
        return dequantize(self.codes, e4m3.decode(self.scales), rows, is_divisor=is_divisor)


def dequantize(
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    row_globals: NDArray[np.float32] | None = None,
    *,
    is_divisor: bool = False,
    table: NDArray[np.float32] = e2m1.VALUES,
) -> NDArray[np.float32]:
    """Return e2m1 * scale (* or / the row's global), rounded once to FP32.

    Args:
        codes: uint8 [N, K / 2].
        scales: Values of the block scales, [N, K / group]; the group follows from the shapes.
        row_globals: [N]; None leaves them out.
        is_divisor: The globals divide; else they multiply.
        table: The value of each code, float32 [16].

    Returns:
        Shape [N, K]. With E4M3 and FP16 scales, values before the global are exact.

    Raises:
        ValueError: If the shapes do not belong together.
    """
    rows, columns = codes.shape[0], codes.shape[1] * 2
    blocks = scales.shape[1] if scales.ndim == codes.ndim else 0
    if scales.shape[0] != rows or blocks == 0 or columns % blocks != 0:
        raise ValueError(f"scales [{rows}, a divisor of {columns}], got {list(scales.shape)}")
    values = table[packing.unpack(codes)].astype(np.float64).reshape(rows, blocks, -1)
    # FP64 holds code * scale (at most 26 bits) and that times a global (at most 50) exactly.
    products = (values * scales.astype(np.float64)[:, :, np.newaxis]).reshape(rows, columns)
    if row_globals is None:
        return products.astype(np.float32)
    factors = row_globals.astype(np.float64)[:, np.newaxis]
    return (products / factors if is_divisor else products * factors).astype(np.float32)


def global_scale(largest: float, convention: Convention) -> np.float32:
    """Return the global scale of a tensor whose largest magnitude is `largest`.

    compressed-tensors: 2688 / largest, or 1 if that is not finite. ModelOpt: largest / 2688.
    """
    amax = np.float32(largest)
    if convention is Convention.MODELOPT:
        return np.float32(amax / _RANGE)
    with np.errstate(over="ignore", invalid="ignore"):
        # The reciprocal is rounded before the product, as torch divides a number by a tensor.
        divisor = (_ONE / np.maximum(amax, np.finfo(np.float32).tiny)) * _RANGE
    return np.float32(divisor) if np.isfinite(divisor) else _ONE


def round_to_nearest(
    weight: NDArray[np.float32],
    convention: Convention,
    *,
    shared_global: np.float32 | None = None,
) -> Quantized:
    """Quantize with the scale amax / 6 of each block.

    Args:
        weight: [N, K], K a multiple of 16, finite.
        convention: Whose bits to give.
        shared_global: The global of a fused site; None takes this matrix's own.

    Raises:
        ValueError: If K is not a multiple of 16 or a value is not finite.
    """
    rows, columns = weight.shape
    if columns % GROUP != 0:
        raise ValueError(f"columns in multiples of {GROUP}, got {columns}")
    if not np.isfinite(weight).all():
        raise ValueError("finite weights, got NaN or infinity")
    blocks = weight.reshape(rows, columns // GROUP, GROUP)
    largest = np.abs(blocks).max(axis=2, initial=0)
    chosen = shared_global
    if chosen is None:
        chosen = global_scale(float(largest.max(initial=0)), convention)
    if convention is Convention.MODELOPT:
        scales, steps = _modelopt_scales(largest, chosen)
    else:
        scales, steps = _compressed_tensors_scales(largest, chosen)
    codes = e2m1.encode(blocks / steps[:, :, np.newaxis]).reshape(rows, columns)
    return Quantized(packing.pack(codes), scales, chosen, convention)


_Scales = tuple["NDArray[np.uint8]", "NDArray[np.float32]"]


def _compressed_tensors_scales(largest: NDArray[np.float32], divisor: np.float32) -> _Scales:
    wanted = divisor * (largest / np.float32(e2m1.MAXIMUM))
    scales = e4m3.encode(np.minimum(wanted, np.float32(e4m3.MAXIMUM)))
    values = e4m3.decode(scales)
    values = np.where(values == 0, _ZERO_BLOCK_DIVISOR, values)
    return e4m3.encode(values), np.asarray(values / divisor, dtype=np.float32)


def _modelopt_scales(largest: NDArray[np.float32], multiplier: np.float32) -> _Scales:
    if multiplier == 0:  # an all-zero tensor: legal scales instead of the tool's NaN
        scales = np.full(largest.shape, e4m3.encode(np.array(_ONE)), dtype=np.uint8)
        return scales, np.ones(largest.shape, dtype=np.float32)
    wanted = largest / (np.float32(e2m1.MAXIMUM) * multiplier)
    wanted = np.where(wanted == 0, _ONE, wanted)
    scales = e4m3.encode(np.clip(wanted, _SMALLEST_SCALE, np.float32(e4m3.MAXIMUM)))
    return scales, np.asarray(e4m3.decode(scales) * multiplier, dtype=np.float32)
