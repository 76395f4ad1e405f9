"""GPTQ with static block scales: rounds a matrix so that the layer's output moves least.

The sums of input products (the Hessian of the squared output error) of a calibration text say how
errors of two columns add up. Scales are chosen first, by a sweep weighted with each column's second
moment. Then columns are rounded one by one, the strongest inputs first, and what each loses is put
on those that follow (Frantar et al., arXiv 2210.17323; Hessian damped by 1 % of its mean diagonal).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from appliance.quantize.native import (
    BLOCK,
    Encoded,
    Mode,
    encode,
    round_panel,
    scales,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DAMPING = 0.01
_PANEL = 128
_WIDEST_IN_FP64 = 8192
"""Wider Hessians are factored in FP32, as is usual: three FP64 ones of 17408 would be 7 GB."""

_VALUES: NDArray[np.float32] = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)


@dataclass(frozen=True)
class Moments:
    """Sums of products of a layer's inputs x [K] over the tokens of a text.

    Attributes:
        calibration: FP32 [K, K], sum of x x^T over the calibration tokens.
        held_out: The same over tokens that calibration does not see.
    """

    calibration: torch.Tensor
    held_out: torch.Tensor


@dataclass(frozen=True)
class Order:
    """What GPTQ needs of a Hessian; all matrices with the same input share it.

    Attributes:
        columns: int64 [K], columns from the strongest input to the weakest.
        factor: FP32 [K, K], upper Cholesky factor of the inverse damped Hessian in that order.
        importance: FP32 [K], second moment of every input in stored order.
    """

    columns: torch.Tensor
    factor: torch.Tensor
    importance: NDArray[np.float32]


@dataclass(frozen=True)
class Calibrated:
    """A calibrated matrix.

    Attributes:
        encoded: Codes and scales as of any other mode.
        output_error: Relative squared error of the layer's output on the held-out tokens.
        output_error_rtn: The same for round to nearest.
    """

    encoded: Encoded
    output_error: float
    output_error_rtn: float


def order_of(hessian: torch.Tensor) -> Order:
    """Factor a Hessian [K, K]; inputs that never fire get its mean diagonal.

    With the order reversed, the Cholesky factor of the Hessian itself gives the one of its inverse
    by a triangular solve, so the inverse is never formed.
    """
    importance = hessian.diagonal().clone()
    mean = importance.mean()
    if not mean > 0:
        mean = torch.ones(())
    damped = hessian.clone()
    damped.diagonal().add_(_DAMPING * mean)
    dead = importance == 0
    damped.diagonal()[dead] = mean
    columns = torch.argsort(importance, descending=True, stable=True)
    backwards = columns.flip(0)
    kind = torch.float64 if len(columns) <= _WIDEST_IN_FP64 else torch.float32
    linalg: Any = torch.linalg  # its stubs say nothing of the results
    damped = damped[backwards][:, backwards].to(kind)
    lower: torch.Tensor = linalg.cholesky(damped)
    del damped  # each of these is K x K
    identity = torch.eye(len(columns), dtype=kind)
    inverse: torch.Tensor = linalg.solve_triangular(lower, identity, upper=False)
    del lower, identity
    # lower = J R J with damped = R R^T in forward order; inverse(damped) = U^T U, U = J lower^-1 J.
    factor = inverse.flip(0, 1).float().contiguous()
    weights = torch.where(dead, torch.full_like(importance, float(mean) * 1e-6), importance)
    return Order(columns, factor, weights.numpy())


def calibrate(
    weights: NDArray[np.float32],
    order: Order,
    moments: Moments,
    *,
    divisor: np.float32,
    threads: int,
) -> Calibrated:
    """Quantize one matrix.

    Args:
        weights: Contiguous [N, K], finite.
        order: Of the Hessian of its input.
        moments: Of its input.
        divisor: The global scale: weight = e2m1 * e4m3 / divisor.
        threads: Threads of the encoder.
    """
    scale_codes = scales(weights, divisor=divisor, importance=order.importance, threads=threads)
    steps = tensor_of(_steps(scale_codes, divisor))
    columns = order.columns
    left = tensor_of(weights)[:, columns].contiguous()
    ordered_steps = steps[:, columns]
    codes = torch.empty(weights.shape, dtype=torch.uint8)
    for begin in range(0, len(columns), _PANEL):
        end = min(begin + _PANEL, len(columns))
        panel, errors = round_panel(
            left[:, begin:end].contiguous().numpy(),
            ordered_steps[:, begin:end].contiguous().numpy(),
            order.factor[begin:end, begin:end].contiguous().numpy(),
            threads=threads,
        )
        codes[:, columns[begin:end]] = tensor_of(panel)
        left[:, end:].addmm_(tensor_of(errors), order.factor[begin:end, end:], alpha=-1.0)
    nibbles = codes.numpy()
    packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << np.uint8(4))
    decoded = _values(nibbles) * steps.numpy()
    lost = decoded - weights
    encoded = Encoded(np.ascontiguousarray(packed), scale_codes, _energy(lost), _energy(weights))
    rounded = encode(weights, "F32", divisor=divisor, mode=Mode.RTN, threads=threads)
    lost_rtn = decode(rounded, divisor) - weights
    return Calibrated(
        encoded,
        output_error(lost, weights, moments.held_out),
        output_error(lost_rtn, weights, moments.held_out),
    )


def decode(encoded: Encoded, divisor: np.float32) -> NDArray[np.float32]:
    """Return the FP32 weights [N, K] of an encoded matrix."""
    packed = encoded.packed
    nibbles = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    nibbles[:, 0::2] = packed & np.uint8(15)
    nibbles[:, 1::2] = packed >> np.uint8(4)
    return _values(nibbles) * _steps(np.asarray(encoded.scales, np.uint8), divisor)


def output_error(
    lost: NDArray[np.float32], weights: NDArray[np.float32], moments: torch.Tensor
) -> float:
    """Squared error of the layer's output relative to the squared output, over a text.

    Args:
        lost: Dequantized minus dense weights [N, K].
        weights: Dense weights [N, K].
        moments: Sum of x x^T over the text's inputs, [K, K].
    """
    whole = _quadratic(tensor_of(weights), moments)
    return _quadratic(tensor_of(lost), moments) / whole if whole > 0 else 0.0


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """View an array as a tensor of the same memory."""
    library: Any = torch  # its stubs do not know the element type
    shared: torch.Tensor = library.from_numpy(array)
    return shared


def _quadratic(matrix: torch.Tensor, moments: torch.Tensor) -> float:
    return float(((matrix @ moments) * matrix).sum(dtype=torch.float64))


def _steps(codes: NDArray[np.uint8], divisor: np.float32) -> NDArray[np.float32]:
    """Block scale / divisor of every weight, [N, K]."""
    values = tensor_of(codes).view(torch.float8_e4m3fn).float().numpy()
    steps: NDArray[np.float32] = np.divide(values, divisor, dtype=np.float32)
    return np.repeat(steps, BLOCK, axis=1)


def _values(nibbles: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _VALUES[nibbles]


def _energy(values: NDArray[np.float32]) -> float:
    return float(np.square(values).sum(dtype=np.float64))
