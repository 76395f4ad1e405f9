"""Attention over vLLM's cache, through the library that computes on host memory."""

from __future__ import annotations

import math

import pytest
import torch

from appliance.vllm_plugin import paged

BLOCK = 16


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cache(blocks: int, heads: int, size: int) -> torch.Tensor:
    """[blocks, heads, tokens, 2 size] as the engine makes it: tokens before heads in memory."""
    whole = torch.full((blocks, BLOCK, heads, 2 * size), math.nan)
    return whole.permute(0, 2, 1, 3)


def dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """Causal attention in FP64 of the last rows of one sequence: [rows, heads, size]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (t.double().repeat_interleave(group, 1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    places = torch.arange(keys.shape[0] - query.shape[0], keys.shape[0])[:, None]
    others = torch.arange(keys.shape[0])[None]
    hidden = others > places
    if window:
        hidden |= others <= places - window
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("decodes", [0, 2])
def test_attend_after_write_equals_dense_attention_of_every_sequence(window, decodes):
    heads = paged.Heads(queries=6, keys=2, size=64, scale=0.125, window=window)
    # Two decodes, a chunk behind a cached beginning, a whole prompt, and one padded sequence.
    lengths, fresh = [40, 1, 33, 20, 0], [1, 1, 17, 20, 0]
    tables = torch.randperm(16, generator=torch.Generator().manual_seed(1))[:15].view(5, 3).int()
    kv_cache = cache(16, 2, 64)
    everything = [numbers(2, length, 2, 64, seed=length) for length in lengths]
    for table, (keys, values) in zip(tables, everything, strict=True):
        places = torch.arange(keys.shape[0])
        slots = table[places // BLOCK].long() * BLOCK + places % BLOCK
        paged.write(heads, keys, values, kv_cache, slots)
    qkv = numbers(sum(fresh) + 3, 10, 64, seed=9)  # queries inside of a fused projection, padded
    query = qkv[:, :6]
    out = torch.full((sum(fresh) + 3, 6 * 64), -7.0)
    step = paged.Step(
        tokens=sum(fresh),
        decodes=decodes,
        decode_length=1,
        max_length=64,
        query_start=torch.tensor([0, *fresh]).cumsum(0).int(),
        lengths=torch.tensor(lengths).int(),
        block_table=tables,
        slots=torch.empty(0, dtype=torch.int64),
    )

    paged.attend(heads, query, kv_cache, step, out)

    begin = 0
    for (keys, values), count in zip(everything, fresh, strict=True):
        rows = query[begin : begin + count]
        right = dense(rows, keys, values, heads.scale, window)
        found = out[begin : begin + count].view(count, 6, 64)
        assert torch.allclose(found.double(), right, atol=1e-5)
        begin += count
    assert (out[begin:] == -7.0).all()


def test_write_of_no_tokens_leaves_the_cache():
    heads = paged.Heads(queries=2, keys=2, size=64, scale=1.0)
    kv_cache = cache(2, 2, 64)

    paged.write(heads, numbers(3, 2, 64), numbers(3, 2, 64), kv_cache, torch.empty(0).long())

    assert kv_cache.isnan().all()


def test_write_of_a_padded_step_writes_its_tokens_only():
    heads = paged.Heads(queries=2, keys=2, size=64, scale=1.0)
    kv_cache = cache(2, 2, 64)
    keys, values = numbers(4, 2, 64), numbers(4, 2, 64, seed=1)

    paged.write(heads, keys, values, kv_cache, torch.tensor([5, -1]))

    assert torch.equal(kv_cache[0, :, 5], torch.cat((keys[0], values[0]), -1))
    assert int((~kv_cache.isnan()).sum()) == 2 * 128
