"""Random canonical weights and what they stand for, by numbers that no code of the plugin made."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch

from appliance.vllm_plugin.canonical import Packed


@dataclass(frozen=True)
class Case:
    """Canonical tensors and the exact weights, float64 [N, K]."""

    packed: Packed
    values: torch.Tensor


def make(rows: int, columns: int, *, divisor: bool = False, seed: int = 0) -> Case:
    """Return random weights of two parts whose globals lie far apart."""
    numbers = np.random.default_rng((rows, columns, seed))
    codes = numbers.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    scales = numbers.integers(0, 0x7F, (rows, columns // 16), dtype=np.uint8)
    first = rows // 3
    row_globals = np.full(rows, 2.0**-9, np.float32)
    row_globals[first:] = 0.37 * 2.0**-6
    nibbles = np.stack((codes & 0xF, codes >> 4), axis=-1).reshape(rows, columns)
    exact = nibbles.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    exact *= scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64).repeat(16, axis=1)
    if divisor:
        row_globals = np.float32(1.0) / row_globals
        exact /= row_globals[:, None].astype(np.float64)
    else:
        exact *= row_globals[:, None].astype(np.float64)
    packed = Packed(
        torch.from_numpy(codes),
        torch.from_numpy(scales).view(torch.float8_e4m3fn),
        torch.from_numpy(row_globals),
        divisor,
        (("first", first), ("second", rows - first)),
    )
    return Case(packed, torch.from_numpy(exact))


@pytest.fixture(name="make")
def make_fixture() -> object:
    return make
