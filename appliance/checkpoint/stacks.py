"""Which way round stacked experts lie: output features first, or turned, as older exports do.

A stack of square matrices looks the same either way. Its exporter turned both stacks of a layer or
none, and they cannot both be square: gate and up together are 2 I x H, down is H x I.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.checkpoint.stored import STACKED

if TYPE_CHECKING:
    from collections.abc import Mapping


def stack_sizes(hidden: int, intermediate: int) -> dict[str, tuple[int, int]]:
    """Return rows and columns of one expert in each stack; gate rows come before up rows.

    Args:
        hidden: Width of the residual stream.
        intermediate: Width of one expert.
    """
    sizes = ((2 * intermediate, hidden), (hidden, intermediate))
    return dict(zip(STACKED, sizes, strict=True))


def lies_turned(
    leaf: str, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, tuple[int, int]]
) -> bool:
    """Tell whether a stack of whole weights has input features before output features.

    Args:
        leaf: `gate_up_proj` or `down_proj`.
        shapes: Shapes of the stacks of one layer as stored, experts first.
        sizes: As `stack_sizes` gives them.
    """
    for each in (leaf, *STACKED):
        rows, columns = sizes[each]
        if each in shapes and rows != columns:
            return shapes[each][1:] == (columns, rows)
    return False
