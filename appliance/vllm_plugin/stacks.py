"""Experts that a checkpoint stores in one tensor, handed to the engine one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.checkpoint.stored import NVFP4_GROUP, STACKED, split_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import torch

GATE_UP, DOWN = STACKED
Pair = tuple[tuple[int, ...], tuple[int, ...]]
_COLUMNS_AN_ELEMENT = {"weight": 2, "weight_scale": NVFP4_GROUP}


@dataclass(frozen=True)
class Stacks:
    """The stacks of one layer as their headers give them.

    Attributes:
        shapes: `gate_up_proj` and `down_proj` to the shapes of codes and of block scales; empty if
            the experts are stored one by one.
    """

    shapes: Mapping[str, Pair] = field(default_factory=dict[str, Pair])

    def is_turned(self, leaf: str, rows: int, columns: int) -> bool:
        """Tell whether input features come before output features, as in older exports."""
        codes, scales = self.shapes[leaf]
        turned = (columns // 2, rows), (columns // NVFP4_GROUP, rows)
        # Codes alone do not tell where rows are half of the columns; the scales then do.
        return (codes[1:], scales[1:]) == turned

    def split(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        hidden: int,
        width: int,
        names: Mapping[str, str],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Give tensors of single experts for those of stacks; others pass.

        Args:
            weights: Names relative to the module of the experts, and tensors.
            hidden: Width of the residual stream.
            width: Width of an expert.
            names: `gate`, `up` and `down` to the engine's names of the matrices.
        """
        sizes = {GATE_UP: (2 * width, hidden), DOWN: (hidden, width)}
        for name, loaded in weights:
            leaf, part = split_name(name)
            if leaf not in self.shapes:
                yield name, loaded
                continue
            rows, columns = sizes[leaf]
            upright = loaded
            if part in _COLUMNS_AN_ELEMENT and self.is_turned(leaf, rows, columns):
                upright = loaded.transpose(1, 2)
            for expert in range(loaded.shape[0] if loaded.dim() else 0):
                yield from _parts(leaf, part, upright[expert], expert, names)


def _parts(
    leaf: str, part: str, loaded: torch.Tensor, expert: int, names: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Give the tensors of one expert: gate rows come first, and its number serves both halves."""
    if leaf == DOWN:
        yield f"{expert}.{names['down']}.{part}", loaded.contiguous()
        return
    halves = loaded.chunk(2) if part in _COLUMNS_AN_ELEMENT else (loaded, loaded)
    for name, half in zip(("gate", "up"), halves, strict=True):
        yield f"{expert}.{names[name]}.{part}", half.contiguous()
