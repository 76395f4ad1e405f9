"""Compares decoded weights with the numpy oracle, one tile of each part, before serving."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.nvfp4 import block, e4m3

if TYPE_CHECKING:
    from numpy.typing import NDArray

TILE_ROWS, TILE_COLUMNS = 16, 64
TOLERANCE = 2.0**-10
"""Largest relative difference: FP16 rounds by 2^-11; a misplaced row differs by far more."""

_SMALLEST = 2.0**-24  # the step of FP16 near zero


def last_tile(rows: int, columns: int, group: int = 16) -> tuple[slice, slice]:
    """Return the last rows and columns of a matrix: where padding and cut parts go wrong first.

    Columns begin at a whole block.
    """
    width = max(TILE_COLUMNS, group)
    first_row, first_column = max(0, rows - TILE_ROWS), max(0, columns - width)
    return slice(first_row, rows), slice(first_column, columns)


def check_tile(
    name: str,
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    row_globals: NDArray[np.float32],
    decoded: NDArray[np.floating],
    *,
    is_divisor: bool,
) -> None:
    """Compare a decoded tile with the oracle.

    Args:
        name: Tensor, for the message.
        codes: uint8 [N, K/2].
        scales: E4M3 bits, uint8 [N, K/16], or float16 or float32 [N, K/group].
        row_globals: float32 [N].
        decoded: [N, K], what the products will read.
        is_divisor: The globals divide.

    Raises:
        ApplianceError: E_SELF_TEST with the first coordinate that differs.
    """
    values = e4m3.decode(scales) if scales.dtype == np.uint8 else scales.astype(np.float32)
    expected = block.dequantize(codes, values, row_globals, is_divisor=is_divisor)
    found = decoded.astype(np.float64)
    wrong = ~(np.abs(found - expected) <= np.abs(expected) * TOLERANCE + _SMALLEST)
    if not wrong.any():
        return
    row, column = (int(at) for at in np.argwhere(wrong)[0])
    wanted = float(expected[row, column])
    fault = Fault(
        "E_SELF_TEST",
        name,
        f"row {row}, column {column} of the last tile must decode to {wanted!r}",
        repr(float(found[row, column])),
        "rebuild the kernel library; do not serve with this one",
    )
    raise ApplianceError(ExitCode.BUG, fault)
