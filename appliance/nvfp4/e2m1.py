"""E2M1, the 4-bit float of NVFP4: sign, two exponent bits, one mantissa bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAXIMUM: Final = 6.0

_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

VALUES: Final[NDArray[np.float32]] = np.array(
    [*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=np.float32
)
"""The value of each code, float32 [16]; code 8 is -0 (OCP Microscaling Formats 1.0, 5.3.3)."""

_MIDPOINTS: Final = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)


def decode(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the values of codes.

    Args:
        codes: One code a byte, 0 to 15, any shape.

    Raises:
        IndexError: If a code is above 15.
    """
    return VALUES[codes]


def encode(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the nearest codes: a tie goes to the even mantissa, beyond 6 saturates.

    A negative value that rounds to zero keeps its sign (code 8); -0 itself gives code 0, as in both
    public quantizers. Values are finite.

    Args:
        values: Any shape.
    """
    magnitudes = np.abs(values)
    below = np.searchsorted(_MIDPOINTS, magnitudes, side="left")
    above = np.searchsorted(_MIDPOINTS, magnitudes, side="right")
    # `below` and `above` differ on a midpoint only; of the two neighbours the even code is right.
    codes = np.where(below % 2 == 0, below, above)
    return np.asarray(codes | np.where(values < 0, 8, 0), dtype=np.uint8)
