"""MXFP4: the same codes as NVFP4 under power-of-two scales, known here so that it is told apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP: Final = 32
"""Elements of K that share a scale (OCP Microscaling Formats 1.0, 5.2)."""

_BIAS: Final = 127
NAN: Final = 255


def decode_scales(codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the values of E8M0 scales, 2^(code - 127); 255 is NaN.

    Args:
        codes: Any shape.
    """
    values = np.ldexp(1.0, codes.astype(np.int32) - _BIAS)
    return np.where(codes == NAN, np.nan, values)
