"""Packed weights of one layer on this rank, as checkpoints store them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Packed:
    """Canonical tensors of one layer, parts stacked by rows.

    Attributes:
        codes: uint8 [N, K/2], element 2j in the low nibble of byte j.
        scales: float8_e4m3fn [N, K/16], or float16 or float32 [N, K/group].
        globals: float32 [N], one for each row even where all are equal.
        divisor: The globals divide; else they multiply.
        parts: Name and rows of each part, in order; their rows sum to N.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    globals: torch.Tensor
    divisor: bool
    parts: tuple[tuple[str, int], ...]

    @property
    def group(self) -> int:
        """Columns that share a block scale."""
        return self.codes.shape[1] * 2 // max(1, self.scales.shape[1])

    @property
    def scale_bits(self) -> torch.Tensor:
        """Block scales as numpy and the C ABI take them: E4M3 as its bits."""
        return self.scales.view(torch.uint8) if self.scales.itemsize == 1 else self.scales

    @property
    def stored_bytes(self) -> int:
        """Bytes of codes, scales and globals."""
        return int(self.codes.nbytes + self.scales.nbytes + self.globals.nbytes)
