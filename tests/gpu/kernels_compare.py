"""How results are judged: close to FP64, equal, or the same bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

TOLERANCE = 1e-3
"""Relative: FP16 rounds to 4.9e-4, FP16 inputs and FP32 sums leave the rest."""


HALF_STEP = 2.0**-25
"""Half of FP16's smallest step: below 6.1e-5 an output cannot be closer, whatever its size."""

GUARD = 8
"""FP16 elements between rows of an output, and one row after the last, that nobody may touch."""
SENTINEL = 7.25


@dataclass(frozen=True)
class Error:
    """How far a result is from FP64: of the whole, and of the worst element."""

    norm: float
    element: float
    at: tuple[int, ...]

    @property
    def worst(self) -> float:
        return max(self.norm, self.element)


def error_of(found: torch.Tensor, right: torch.Tensor, typical: torch.Tensor) -> Error:
    """Measure a result; NaN and infinity give an infinite error.

    Args:
        found: What the library computed, [M, N].
        right: FP64 of the same shape.
        typical: FP64 that broadcasts to it: the size a sum of such terms has. An element is
            compared with the larger of itself and this, since a sum that happens to cancel keeps
            the rounding of its terms.
    """
    error = (found.double() - right).abs()
    error = torch.where(torch.isfinite(error), error, torch.full_like(error, math.inf))
    norm = float(error.norm() / right.norm().clamp_min(1e-30))
    each = (error - HALF_STEP).clamp_min(0) / torch.maximum(right.abs(), typical).clamp_min(1e-30)
    flat = int(each.argmax())
    at = tuple(int(index) for index in torch.unravel_index(torch.tensor(flat), each.shape))
    return Error(norm, float(each.flatten()[flat]), at)


def typical_of(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """FP64 [M, N]: the size of sums over k if the signs fall at random."""
    rows, columns = x.double().norm(dim=1), values.norm(dim=1)
    return rows[:, None] * columns[None, :] / math.sqrt(x.shape[1])


def assert_close(
    found: torch.Tensor, right: torch.Tensor, typical: torch.Tensor, where: str
) -> Error:
    error = error_of(found, right, typical)
    assert error.worst <= TOLERANCE, (
        f"{where}: norm {error.norm:.2e}, element {error.element:.2e} at {list(error.at)}: "
        f"{float(found[error.at])} for {float(right[error.at])}"
    )
    return error


def assert_same(found: torch.Tensor, right: torch.Tensor, where: str) -> None:
    """Equal values everywhere; name the first that is not."""
    wrong = found.double() != right.double()
    if bool(wrong.any()):
        at = [int(index) for index in wrong.nonzero()[0]]
        index = tuple(at)
        raise AssertionError(
            f"{where}: {int(wrong.sum())} wrong, first at {list(at)}: "
            f"{float(found[index])} for {float(right[index])}"
        )


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bit for bit; shapes and FP16 or FP32 of both are equal."""
    integer = torch.int16 if first.dtype == torch.float16 else torch.int32
    return torch.equal(first.contiguous().view(integer), second.contiguous().view(integer))


def unguarded(whole: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inside of a guarded output; the outside must be as it was."""
    assert bool((whole[:rows, columns:] == SENTINEL).all()), "wrote past the last column"
    assert bool((whole[rows] == SENTINEL).all()), "wrote past the last row"
    return whole[:rows, :columns]
