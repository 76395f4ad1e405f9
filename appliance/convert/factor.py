"""The other way round of a global scale: from multiplier to divisor and back, without a rounding.

A weight is the FP32 number nearest to e2m1 * scale * multiplier or to e2m1 * scale / divisor. The
reciprocal of an FP32 number is seldom one, so whether a matrix keeps every bit is tried out on all
products that can occur in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.nvfp4 import block, e4m3

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NEIGHBOURS = 2
_ALL_CODES = np.arange(16, dtype=np.uint8)
_PACKED = (_ALL_CODES[0::2] | (_ALL_CODES[1::2] << np.uint8(4))).reshape(1, 8)


@dataclass(frozen=True)
class Reciprocal:
    """A global that means the same the other way round.

    Attributes:
        value: The global.
        difference: Largest relative difference of a weight; 0 if all keep their bits.
    """

    value: np.float32
    difference: float


def reciprocal_of(factor: np.float32, scales: NDArray[np.uint8], *, is_divisor: bool) -> Reciprocal:
    """Turn a global round.

    Args:
        factor: As stored, positive.
        scales: E4M3 bits of the matrix it belongs to, any shape.
        is_divisor: Whether the stored one divides; the result then multiplies, else it divides.

    Returns:
        The exact one if it or a neighbour is; else the one nearest to 1 / factor.
    """
    used = e4m3.decode(np.unique(scales)).astype(np.float32)[:, None]
    before = _weights(used, factor, is_divisor=is_divisor)
    nearest = np.float32(np.float64(1.0) / np.float64(factor))
    best = Reciprocal(nearest, _difference(before, used, nearest, is_divisor=not is_divisor))
    for direction in (np.float32(0.0), np.float32(np.inf)):
        candidate = nearest
        for _ in range(_NEIGHBOURS):
            if best.difference == 0.0:
                return best
            candidate = np.nextafter(candidate, direction, dtype=np.float32)
            difference = _difference(before, used, candidate, is_divisor=not is_divisor)
            if difference == 0.0:
                best = Reciprocal(candidate, 0.0)
    return best


def _weights(
    scales: NDArray[np.float32], factor: np.float32, *, is_divisor: bool
) -> NDArray[np.float32]:
    """Every weight that a scale can give, [scales, 16]."""
    count = len(scales)
    codes = np.repeat(_PACKED, count, axis=0)
    return block.dequantize(
        codes, scales, np.full(count, factor, np.float32), is_divisor=is_divisor
    )


def _difference(
    before: NDArray[np.float32],
    scales: NDArray[np.float32],
    factor: np.float32,
    *,
    is_divisor: bool,
) -> float:
    if not (np.isfinite(factor) and factor > 0):
        return float("inf")
    after = _weights(scales, factor, is_divisor=is_divisor)
    sizes: NDArray[Any] = np.maximum(np.abs(before.astype(np.float64)), np.finfo(np.float64).tiny)
    return float((np.abs(after.astype(np.float64) - before.astype(np.float64)) / sizes).max())
