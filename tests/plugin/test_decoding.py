"""The decoding operation and its check against the oracle."""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

from appliance.errors import ApplianceError
from appliance.vllm_plugin import ops, weights
from appliance.vllm_plugin.canonical import Packed
from appliance.vllm_plugin.spotcheck import last_tile


def packed(rows: int, columns: int, *, divisor: bool = False) -> Packed:
    """Return random canonical tensors of two parts with globals far apart."""
    numbers = np.random.default_rng(rows * columns)
    codes = torch.from_numpy(numbers.integers(0, 256, (rows, columns // 2), dtype=np.uint8))
    scales = torch.from_numpy(numbers.integers(0, 0x7F, (rows, columns // 16), dtype=np.uint8))
    first = rows // 3
    row_globals = torch.full((rows,), 0.01)
    row_globals[first:] = 0.37
    if divisor:
        row_globals = 1 / row_globals
    parts = (("first", first), ("second", rows - first))
    return Packed(codes, scales.view(torch.float8_e4m3fn), row_globals, divisor, parts)


def expected(given: Packed) -> np.ndarray:
    """Decode with the types of ml_dtypes in FP64 and round once."""
    codes = given.codes.numpy()
    nibbles = np.stack((codes & 0xF, codes >> 4), axis=-1).astype(np.uint8)
    values = (
        nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64).reshape(codes.shape[0], -1, 16)
    )
    scales = given.scales.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    exact = (values * scales.astype(np.float64)[..., None]).reshape(codes.shape[0], -1)
    row_globals = given.globals.numpy().astype(np.float64)[:, None]
    result = exact / row_globals if given.divisor else exact * row_globals
    return result.astype(np.float32)


@pytest.mark.parametrize("divisor", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (3, 48), (17, 272), (134, 1040)])
def test_decode_any_shape_gives_the_nearest_fp32(rows: int, columns: int, divisor: bool) -> None:
    given = packed(rows, columns, divisor=divisor)

    decoded = weights.dequantize_checked(given, torch.float32)

    np.testing.assert_array_equal(decoded.numpy(), expected(given))


def test_decode_to_fp16_rounds_the_fp32_value_once() -> None:
    given = packed(33, 64)

    decoded = weights.dequantize_checked(given, torch.float16)

    np.testing.assert_array_equal(decoded.numpy(), expected(given).astype(np.float16))


def test_decode_to_bf16_rounds_the_fp32_value_once() -> None:
    given = packed(33, 64)

    decoded = weights.dequantize_checked(given, torch.bfloat16)

    wanted = torch.from_numpy(expected(given)).to(torch.bfloat16)
    assert torch.equal(decoded, wanted)


def test_decode_fake_gives_the_shape_and_type() -> None:
    given = packed(6, 32)

    with torch._subclasses.FakeTensorMode() as mode:
        codes, scales, row_globals = (
            mode.from_tensor(tensor) for tensor in (given.codes, given.scales, given.globals)
        )
        decoded = ops.decode(codes, scales, row_globals, False, torch.float16)

    assert (tuple(decoded.shape), decoded.dtype) == ((6, 32), torch.float16)


def test_spot_check_wrong_last_row_of_a_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    given = packed(60, 128)
    decoded = ops.decode(given.codes, given.scales, given.globals, given.divisor, torch.float32)
    decoded[19, 127] += 1.0  # the last row of the first part
    monkeypatch.setattr(ops, "decode", lambda *_: decoded)

    with pytest.raises(
        ApplianceError, match=re.escape("error[E_SELF_TEST] first: row 15, column 63")
    ):
        weights.dequantize_checked(given, torch.float32)


@pytest.mark.parametrize(
    ("size", "tile"),
    [((1, 16), (0, 0)), ((16, 64), (0, 0)), ((17, 272), (1, 208)), ((134, 1040), (118, 976))],
)
def test_last_tile_begins_at_a_whole_block(size: tuple[int, int], tile: tuple[int, int]) -> None:
    rows, columns = last_tile(*size)

    assert (rows.start, columns.start) == tile
    assert (rows.stop, columns.stop) == size
    assert columns.start % 16 == 0


def choosing(routed: ops.Routed) -> torch.Tensor:
    """Let the operation choose a way."""
    return ops.experts(**vars(routed))


WAYS = (choosing, ops.sorted_experts, ops.every_expert, ops.copied_experts)


@pytest.mark.parametrize("work_bytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weight_input", [False, True])
def test_experts_sum_the_weighted_outputs_of_each_token(
    way: Callable[[ops.Routed], torch.Tensor],
    weight_input: bool,
    work_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "_WORK_BYTES", work_bytes)
    generator = torch.Generator().manual_seed(1)
    x, gate_up, down = (
        torch.randn(*shape, generator=generator) for shape in ((5, 8), (3, 12, 8), (3, 8, 6))
    )
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [-1, 1], [2, -1]], dtype=torch.int32)
    shares = torch.rand(5, 2, generator=generator)

    result = way(ops.Routed(x, gate_up, down, shares, ids, weight_input))

    wanted = torch.zeros(5, 8)
    for token in range(5):
        for slot in range(2):
            expert = int(ids[token, slot])
            if expert >= 0:
                share = shares[token, slot]
                hidden = gate_up[expert] @ (x[token] * share if weight_input else x[token])
                inner = torch.nn.functional.silu(hidden[:6]) * hidden[6:]
                wanted[token] += (1.0 if weight_input else share) * (down[expert] @ inner)
    torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_experts_of_a_rank_without_any_give_zero(way: Callable[[ops.Routed], torch.Tensor]) -> None:
    x, ids = torch.randn(4, 8), torch.full((4, 2), -1, dtype=torch.int32)
    gate_up, down = torch.randn(3, 12, 8), torch.full((3, 8, 6), torch.nan)

    result = way(ops.Routed(x, gate_up, down, torch.rand(4, 2), ids, weight_input=False))

    assert torch.equal(result, torch.zeros(4, 8))


def test_experts_fake_gives_the_shape_of_the_input() -> None:
    with torch._subclasses.FakeTensorMode():
        x, ids = torch.empty(5, 8), torch.empty(5, 2, dtype=torch.int32)
        result = ops.experts(
            x,
            torch.empty(3, 12, 8),
            torch.empty(3, 8, 6),
            weights=torch.empty(5, 2),
            ids=ids,
            weight_input=False,
        )

    assert tuple(result.shape) == (5, 8)
