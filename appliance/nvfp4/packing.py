"""The canonical packing of E2M1 codes: two a byte, the even element in the low nibble."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def pack(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return packed bytes.

    Args:
        codes: One code a byte, 0 to 15, shape [..., K].

    Returns:
        Shape [..., K / 2]; byte j holds element 2j in its low and 2j + 1 in its high nibble. Read
        as little-endian uint32, nibble i of word w is element 8w + i.

    Raises:
        ValueError: If K is odd or a code is above 15.
    """
    if codes.shape[-1] % 2 != 0:
        raise ValueError(f"an even number of columns, got {codes.shape[-1]}")
    if codes.size and int(codes.max()) > 15:  # noqa: PLR2004 - a nibble
        raise ValueError(f"codes from 0 to 15, got {int(codes.max())}")
    low, high = codes[..., 0::2], codes[..., 1::2]
    return (low | (high << 4)).astype(np.uint8)


def unpack(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return one code a byte, shape [..., K], from packed bytes [..., K / 2]."""
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=np.uint8)
    codes[..., 0::2] = packed & 15
    codes[..., 1::2] = packed >> 4
    return codes
