"""NVFP4 blocks of GGUF (type 40) in the canonical order: nibbles and scales move, no value changes.

A super-block is 64 weights in 36 bytes: 4 scales, then 8 bytes for each 16 weights, whose low
nibbles are weights 0 to 7 and high nibbles 8 to 15. GGML doubles the codes and halves the scales,
which cancels; a scale of 0x7F counts as 0 there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from appliance.nvfp4 import packing

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUPER_BLOCK: Final = 64
BLOCK_BYTES: Final = 36

_SCALES: Final = 4
_ZERO: Final = 0x7F


def unpack_blocks(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return canonical codes and scales of super-blocks.

    Args:
        blocks: uint8 [..., B, 36].

    Returns:
        Codes, uint8 [..., B * 32], element 2j in the low nibble of byte j; E4M3 scales, uint8
        [..., B * 4]. A scale with its sign bit set is passed on, for the caller to refuse.

    Raises:
        ValueError: If the last axis is not 36 bytes.
    """
    if blocks.ndim < 2 or blocks.shape[-1] != BLOCK_BYTES:  # noqa: PLR2004 - blocks of bytes
        raise ValueError(f"[..., B, {BLOCK_BYTES}], got {list(blocks.shape)}")
    lead, count = blocks.shape[:-2], blocks.shape[-2]
    data = blocks[..., _SCALES:].reshape(*lead, count, _SCALES, 8)
    low, high = data & np.uint8(15), data >> np.uint8(4)
    nibbles = np.concatenate([low, high], axis=-1)
    codes = packing.pack(nibbles.reshape(*lead, count * SUPER_BLOCK))
    scales = blocks[..., :_SCALES].reshape(*lead, count * _SCALES)
    return codes, np.where(scales == _ZERO, 0, scales).astype(np.uint8)
