"""The operations of vLLM's extension, through the library that computes on host memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from appliance.errors import ApplianceError
from appliance.vllm_plugin import engine_ops
from appliance.vllm_plugin.route import WeightRoute
from appliance.vllm_plugin.startup_table import rows

TYPES = [torch.float16, torch.float32]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(dtype: torch.dtype) -> float:
    """The relative error of one rounding, with some room for FP32 sums."""
    return 2.0**-10 if dtype == torch.float16 else 2.0**-19


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", TYPES)
def test_rms_norm_of_a_strided_view_is_that_of_its_rows(dtype):
    heads = numbers(5, 6, 32, dtype=dtype)[:, 1:4]  # as the keys inside of a fused q/k/v
    weight = numbers(32, dtype=dtype, seed=1)
    result = torch.full((5, 3, 32), torch.nan, dtype=dtype)

    engine_ops.rms_norm(result, heads, weight, 1e-6)

    right = normed(heads, weight, 1e-6)
    assert ((result.double() - right).abs() <= right.abs() * step(dtype) + 1e-7).all()


def test_rms_norm_without_a_weight_only_normalises():
    x = numbers(3, 16)
    result = torch.empty_like(x)

    engine_ops.rms_norm(result, x, None, 1e-6)

    assert torch.allclose(result.double(), normed(x, torch.ones(16), 1e-6), rtol=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
def test_fused_add_rms_norm_writes_the_sum_and_its_norm_in_place(dtype):
    x, residual = numbers(4, 64, dtype=dtype), numbers(4, 64, dtype=dtype, seed=1)
    weight = numbers(64, dtype=dtype, seed=2)
    total = x.double() + residual.double()

    engine_ops.fused_add_rms_norm(x, residual, weight, 1e-5)

    right = normed(total, weight, 1e-5)
    assert torch.equal(residual, total.to(dtype))
    assert ((x.double() - right).abs() <= right.abs() * step(dtype) + 1e-7).all()


def test_fused_add_rms_norm_of_columns_reaches_the_caller_s_memory():
    whole, residual = numbers(16, 8).t(), numbers(8, 16, seed=1)
    right = normed(whole.double() + residual.double(), torch.ones(16), 1e-5)

    engine_ops.fused_add_rms_norm(whole, residual, torch.ones(16), 1e-5)

    assert torch.allclose(whole.double(), right, rtol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
def test_silu_and_mul_takes_the_halves_of_the_last_axis(dtype):
    x = numbers(2, 3, 80, dtype=dtype)
    result = torch.empty(2, 3, 40, dtype=dtype)

    engine_ops.silu_and_mul(result, x)

    wide = x.double()
    right = torch.nn.functional.silu(wide[..., :40]) * wide[..., 40:]
    assert ((result.double() - right).abs() <= right.abs() * step(dtype) + 1e-7).all()


def rotated(x: torch.Tensor, angles: torch.Tensor, *, neox: bool) -> torch.Tensor:
    """Rotate [tokens, heads, size]; angles are [tokens, rotary / 2]."""
    half = angles.shape[1]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = (
        (x[..., :half], x[..., half : 2 * half])
        if neox
        else (x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2])
    )
    turned = first * cos - second * sin, second * cos + first * sin
    both = torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2)
    return torch.cat((both, x[..., 2 * half :]), -1)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("with_key", [True, False])
def test_rotary_embedding_turns_views_of_a_fused_projection(neox, with_key):
    size, rotary = 16, 8
    qkv = numbers(5, 7 * size)
    query, key = qkv[:, : 4 * size], qkv[:, 4 * size : 6 * size]
    before = qkv.clone()
    inverse = 100.0 ** -(torch.arange(0, rotary, 2) / rotary)
    angles = torch.arange(32)[:, None] * inverse
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.tensor([3, 0, 31, 7, 7])

    engine_ops.rotary_embedding(positions, query, key if with_key else None, size, cache, neox)

    heads = before.view(5, 7, size).double()
    right = rotated(heads, angles[positions].double(), neox=neox)
    turned = 6 if with_key else 4
    assert torch.allclose(qkv.view(5, 7, size)[:, :turned].double(), right[:, :turned], atol=1e-6)
    assert torch.equal(qkv[:, turned * size :], before[:, turned * size :])


def test_rotary_embedding_with_an_offset_is_refused():
    with pytest.raises(ApplianceError, match=r"error\[E_ROTARY\] .* got offset 4, inverse False"):
        engine_ops.rotary_embedding(
            torch.zeros(1, dtype=torch.int64), numbers(1, 8), None, 8, numbers(4, 4), True, 4
        )


def test_reshape_and_cache_writes_slots_of_an_interleaved_cache_and_no_others():
    heads, size, block = 2, 8, 4
    cache = torch.full((3, block, heads, 2 * size), -1.0)
    keys, values = cache.split(size, dim=-1)
    k, v = numbers(5, heads, size), numbers(5, heads, size, seed=1)  # the last two are padding
    slots = torch.tensor([9, -1, 2])

    engine_ops.reshape_and_cache_flash(k, v, keys, values, slots, "auto", k, v)

    flat = cache.view(-1, heads, 2 * size)
    assert torch.equal(flat[9], torch.cat((k[0], v[0]), -1))
    assert torch.equal(flat[2], torch.cat((k[2], v[2]), -1))
    assert (flat[[0, 1, 3, 4, 5, 6, 7, 8, 10, 11]] == -1).all()


def test_reshape_and_cache_of_another_type_is_refused():
    cache = torch.zeros(1, 16, 1, 8, dtype=torch.uint8)
    slots = torch.zeros(1, dtype=torch.int64)
    k = numbers(1, 1, 8)

    with pytest.raises(ApplianceError, match=r"error\[E_KV_TYPE\] .* got fp8_e4m3;"):
        engine_ops.reshape_and_cache_flash(k, k, cache, cache, slots, "fp8_e4m3", k, k)


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("bias", [None, 0.5])
def test_topk_softmax_gives_the_largest_in_falling_order(index_type, renormalize, bias):
    logits = numbers(7, 12)
    weights, ids = torch.empty(7, 3), torch.empty(7, 3, dtype=index_type)
    added = None if bias is None else torch.linspace(0, bias, 12)

    engine_ops.topk_softmax(weights, ids, torch.empty(0), logits, renormalize, added, None)

    scores = logits.double().softmax(-1)
    right = (scores if added is None else scores + added).topk(3).indices
    shares = scores.gather(1, right)
    shares = shares / shares.sum(-1, keepdim=True) if renormalize else shares
    assert torch.equal(ids.long(), right)
    assert torch.allclose(weights.double(), shares, rtol=1e-5)


def test_activations_of_another_type_are_refused_with_what_to_set():
    x = numbers(1, 8).bfloat16()

    with pytest.raises(ApplianceError, match=r"error\[E_ACTIVATION_TYPE\] dtype: .* got bfloat16;"):
        engine_ops.rms_norm(torch.empty_like(x), x, None, 1e-6)


DEFINED = """
import json, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from appliance.vllm_plugin import engine_ops
engine_ops.define()
engine_ops.define()
x = torch.ones(2, 8)
out = torch.empty_like(x)
torch.ops._C.rms_norm(out, x, torch.ones(8), 1e-6)
with FakeTensorMode() as mode:
    fake = mode.from_tensor(x)
    torch.ops._C.silu_and_mul(mode.from_tensor(torch.empty(2, 4)), fake)
known = {name: hasattr(getattr(torch.ops, name.partition(".")[0]), name.partition(".")[2])
         for name, _ in engine_ops.table()}
print(json.dumps({
    "norm": out.tolist(),
    "same": torch.ops._C.weak_ref_tensor(x).data_ptr() == x.data_ptr(),
    "fp8": torch.ops._C.cutlass_scaled_mm_supports_fp8(70),
    "known": known,
    "vllm": "vllm" in sys.modules,
}))
"""


def test_operations_defined_twice_in_a_fresh_process_answer_where_vllm_looks():
    done = subprocess.run(
        [sys.executable, "-c", DEFINED], capture_output=True, text=True, check=True, timeout=120
    )
    found = json.loads(done.stdout)

    assert found["norm"][0] == pytest.approx([1.0] * 8, rel=1e-5)
    assert found["same"] is True
    assert found["fp8"] is False
    assert all(found["known"].values())
    assert found["vllm"] is False


def test_repetition_penalty_moves_only_tokens_that_occurred_and_away_from_likely():
    logits = torch.tensor([[2.0, -2.0, 3.0, -3.0, 0.0], [2.0, -2.0, 3.0, -3.0, 0.0]])
    in_prompt = torch.tensor([[1, 1, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()
    in_output = torch.tensor([[0, 1, 0, 0, 0], [0, 0, 1, 1, 0]]).bool()

    engine_ops.apply_repetition_penalties(logits, in_prompt, in_output, torch.tensor([2.0, 0.5]))

    right = [[1.0, -4.0, 3.0, -3.0, 0.0], [2.0, -2.0, 6.0, -1.5, 0.0]]
    assert logits.tolist() == right


def test_table_names_what_each_product_and_operation_runs_on():
    fused, decoded = dict(rows(WeightRoute.FUSED)), dict(rows(WeightRoute.DEQUANTIZED))

    assert fused["nvfp4.linear"] == fused["nvfp4.experts"] == "libnvfp4_sm70.so"
    assert fused["nvfp4.experts_of_8_or_16_bits"] == "torch, on decoded weights"
    assert decoded["nvfp4.linear"] == "torch, on decoded weights"
    assert fused["_C.rms_norm"].startswith("libnvfp4_sm70.so")
    assert fused["_C.cutlass_scaled_mm_supports_fp4"] == "constant: no"
