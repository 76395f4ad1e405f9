"""E4M3 "fn", the 8-bit float of NVFP4 block scales: bias 7, no infinity, NaN is 0x7F and 0xFF."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAXIMUM: Final = 448.0

LARGEST_LEGAL: Final = 0x7E
"""Of a block scale: above it lie NaN and the codes with a sign."""

_MANTISSA_STEPS: Final = 8
_BIAS: Final = 7


def _all_values() -> NDArray[np.float32]:
    codes = np.arange(128)
    exponents = codes // _MANTISSA_STEPS
    fractions = codes % _MANTISSA_STEPS
    normal = np.ldexp(1.0 + fractions / _MANTISSA_STEPS, exponents - _BIAS)
    subnormal = np.ldexp(fractions / _MANTISSA_STEPS, 1 - _BIAS)
    positive = np.where(exponents == 0, subnormal, normal)
    positive[-1] = np.nan
    return np.asarray(np.concatenate([positive, -positive]), dtype=np.float32)


VALUES: Final[NDArray[np.float32]] = _all_values()
"""The value of each code, float32 [256]."""

_FINITE: Final = VALUES[: LARGEST_LEGAL + 1].astype(np.float64)
_MIDPOINTS: Final = (_FINITE[:-1] + _FINITE[1:]) / 2


def decode(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the values of codes, any shape."""
    return VALUES[codes]


def encode(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the nearest codes: a tie goes to the even one, beyond 448 saturates, NaN stays NaN.

    Args:
        values: Any shape; the sign is kept, also of zero.
    """
    magnitudes = np.abs(values)
    below = np.searchsorted(_MIDPOINTS, magnitudes, side="left")
    above = np.searchsorted(_MIDPOINTS, magnitudes, side="right")
    codes = np.where(below % 2 == 0, below, above)
    codes = np.where(np.isnan(values), 0x7F, codes)
    return np.asarray(codes | np.where(np.signbit(values), 0x80, 0), dtype=np.uint8)


def is_legal_scale(codes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Tell which codes a block scale may have: finite and without a sign bit."""
    return codes <= LARGEST_LEGAL
