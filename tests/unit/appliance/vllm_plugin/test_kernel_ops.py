"""Products with packed weights, through the library that computes on host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from appliance.errors import ApplianceError
from appliance.nvfp4 import abi
from appliance.nvfp4.library import reference_library
from appliance.plan.estimates import WORKSPACE_BYTES
from appliance.vllm_plugin import kernel_ops, resident
from appliance.vllm_plugin.canonical import Packed

LINEAR, GATE_UP = abi.WeightKind.LINEAR, abi.WeightKind.GATE_UP
HALF_STEP = 2.0**-10  # one rounding to FP16, and a spare bit for FP32 sums


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def close(found: torch.Tensor, right: torch.Tensor, magnitude: torch.Tensor) -> bool:
    """Say if each element is right to the rounding of one FP16 number, or of its largest term."""
    slack = right.abs() * HALF_STEP + magnitude * 2.0**-18
    return bool(((found.double() - right).abs() <= slack).all())


@pytest.mark.parametrize("divisor", [False, True])
@pytest.mark.parametrize(("rows", "columns", "m"), [(65, 80, 3), (7, 16, 1), (130, 192, 33)])
def test_linear_gives_the_product_of_exact_weights(make, rows, columns, m, divisor):
    case, x = make(rows, columns, divisor=divisor), tokens(m, columns)
    weight = resident.pack(case.packed, LINEAR)

    found = kernel_ops.linear(x, weight, bias := tokens(rows, seed=2))

    right = x.double() @ case.values.T + bias.double()
    assert found.dtype == torch.float16
    assert close(found, right, x.double().abs() @ case.values.T.abs() + bias.double().abs())


def test_linear_above_the_break_even_gives_the_same_product_in_slices(make, monkeypatch):
    for divisor in (False, True):
        case, x = make(70, 96, divisor=divisor), tokens(5, 96)
        weight = resident.pack(case.packed, LINEAR)
        bias = tokens(70, seed=3)
        whole = kernel_ops.linear(x, weight, bias)
        with monkeypatch.context() as patched:
            # The host library never asks for slices, and torch's CPU build adds in FP16.
            patched.setattr(kernel_ops, "_slice_rows", lambda *_: 32)
            patched.setattr(kernel_ops, "_product", lambda x, w: x.float() @ w.float().t())
            sliced = kernel_ops.linear(x, weight, bias)

        assert (whole.float() - sliced.float()).abs().max() <= whole.float().abs().max() * HALF_STEP


def test_linear_of_scales_that_fp16_does_not_hold_is_never_sliced(make, monkeypatch):
    case = make(32, 128)
    scales = torch.rand(32, 1) + 0.1  # FP32, one for 128 columns
    whole = replace(case.packed, scales=scales)
    weight, x = resident.pack(whole, LINEAR), tokens(3, 128)
    right = kernel_ops.linear(x, weight)
    monkeypatch.setattr(kernel_ops, "_slice_rows", lambda *_: pytest.fail("sliced"))

    assert torch.equal(kernel_ops.linear(x, weight), right)


@pytest.mark.parametrize("m", [513, 2048, 8192])
@pytest.mark.parametrize("k", [576, 5120, 17408])
def test_rows_of_a_slice_fit_what_the_plan_leaves_for_kernels(m, k):
    rows = kernel_ops.bounded_rows(1 << 20, m, k)

    assert rows % 64 == 0
    assert 0 < rows * (2 * k + 4 * m) <= WORKSPACE_BYTES
    assert kernel_ops.bounded_rows(100, m, k) == 100


def test_linear_of_a_slice_that_is_not_aligned_equals_that_of_a_copy(make):
    case = make(32, 32)
    weight = resident.pack(case.packed, LINEAR)
    wide = tokens(4, 37)
    x = wide[:, 3:35]

    assert torch.equal(kernel_ops.linear(x, weight), kernel_ops.linear(x.clone(), weight))


def test_linear_of_fewer_columns_than_stored_meets_zeros(make):
    case = make(16, 48)
    weight = resident.pack(case.packed, LINEAR)
    x = tokens(2, 40)

    found = kernel_ops.linear(x, weight)

    right = x.double() @ case.values[:, :40].T
    assert close(found, right, x.double().abs() @ case.values[:, :40].T.abs())


def test_linear_of_no_tokens_and_of_more_axes_keeps_the_shape(make):
    weight = resident.pack(make(16, 32).packed, LINEAR)

    assert kernel_ops.linear(tokens(0, 32), weight).shape == (0, 16)
    assert kernel_ops.linear(tokens(2, 3, 32), weight).shape == (2, 3, 16)


def test_operations_on_tensors_without_data_give_the_shapes(make):
    weight = resident.pack(make(16, 32).packed, LINEAR)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(tokens(5, 32))
        product = torch.ops.nvfp4.linear(x, weight.buffer, weight.handle, 16, None)
        routed = torch.ops.nvfp4.packed_experts(
            *(x, weight.buffer, weight.handle, weight.buffer, weight.handle, x, x, None)
        )

    assert product.shape == (5, 16)
    assert product.dtype == torch.float16
    assert routed.shape == (5, 32)


def stacked(cases: list) -> Packed:
    """Return the canonical tensors of several experts as one."""
    parts = tuple(part for case in cases for part in case.packed.parts)
    fields = ("codes", "scales", "globals")
    tensors = {
        name: torch.cat([getattr(c.packed, name).view(torch.uint8) for c in cases])
        for name in fields[:2]
    }
    whole = torch.cat([case.packed.globals for case in cases])
    scales = tensors["scales"].view(torch.float8_e4m3fn)
    return replace(
        cases[0].packed, codes=tensors["codes"], scales=scales, globals=whole, parts=parts
    )


@pytest.mark.parametrize("mapped", [False, True])
def test_experts_give_the_weighted_sum_over_those_of_this_rank(make, mapped):
    hidden, width, count, top_k, m = 64, 48, 3, 2, 9
    first = [make(2 * width, hidden, seed=e) for e in range(count)]
    second = [make(hidden, width, seed=10 + e) for e in range(count)]
    gate_up = resident.pack(stacked(first), GATE_UP, count)
    down = resident.pack(stacked(second), LINEAR, count)
    x = tokens(m, hidden) / 8
    picks = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(4, generator=picks)[:top_k] for _ in range(m)]).int()
    shares = torch.rand(m, top_k, generator=picks)
    # Global expert 3 is another rank's; with a map the local order is turned round.
    order = [2, 1, 0, -1] if mapped else [0, 1, 2, -1]
    expert_map = torch.tensor(order, dtype=torch.int32) if mapped else None

    found = kernel_ops.experts(x, gate_up, down, weights=shares, ids=ids, expert_map=expert_map)

    right = torch.zeros(m, hidden, dtype=torch.float64)
    for token, slot in [(t, s) for t in range(m) for s in range(top_k)]:
        expert = order[int(ids[token, slot])]
        if expert >= 0:
            both = x[token].double() @ first[expert].values.T
            inner = torch.nn.functional.silu(both[:width]) * both[width:]
            inner = inner.half().double()
            right[token] += shares[token, slot].double() * (inner @ second[expert].values.T)
    assert (found.double() - right).abs().max() <= right.abs().max() * HALF_STEP * 2


def test_packed_weight_is_checked_against_the_oracle_at_its_last_tile(make, monkeypatch):
    case = make(64, 64)
    library = reference_library()
    real = library.dequantize

    def wrong(weight, out, **options):
        real(weight, out, **options | {"row_begin": max(0, options["row_begin"] - 1)})

    monkeypatch.setattr(library, "dequantize", wrong)
    with pytest.raises(ApplianceError, match=r"error\[E_SELF_TEST\] first: row "):
        resident.pack(case.packed, LINEAR)


def test_decode_gives_the_nearest_values(make):
    case = make(40, 64)

    single, half = (resident.decode(case.packed, t) for t in (torch.float32, torch.float16))

    assert torch.equal(single, case.values.float())
    assert torch.equal(half, case.values.float().half())


def test_bad_scale_that_reaches_the_library_is_refused(make):
    case = make(32, 32)
    case.packed.scales.view(torch.uint8)[5, 1] = 0x7F

    with pytest.raises(ApplianceError, match="NVFP4_ESCALE_NAN"):
        resident.pack(case.packed, LINEAR)
