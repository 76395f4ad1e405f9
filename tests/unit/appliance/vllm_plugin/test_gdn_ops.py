"""The gated delta rule's operations, through the library that computes on host memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from appliance.vllm_plugin import gdn_ops

KEY_HEADS, VALUE_HEADS, SIZE, WIDTH = 2, 6, 64, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
SLOTS = 8
# Two decodes, of which one is a prompt of one token; a chunk of a longer one; a whole prompt.
COUNTS, PLACES, CARRIED = [1, 1, 9, 70], [3, 1, 7, 2], [True, False, True, False]
PADDING = 3


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(counts: list[int], places: list[int], carried: list[bool], decodes: int) -> gdn_ops.Batch:
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return gdn_ops.Batch(
        decodes=decodes,
        longest=max(counts),
        query_start=starts,
        slots=torch.tensor(places, dtype=torch.int32),
        carried=torch.tensor(carried),
    )


def convolved(x: torch.Tensor, weight: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
    """silu of the causal convolution of one sequence in FP64; past is [channels, width - 1]."""
    whole = torch.cat([past.T, x]).double()
    sums = functional.conv1d(whole.T[None], weight.double()[:, None], groups=x.shape[1])
    return functional.silu(sums[0].T)


def recurred(
    mixed: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor],
    rates: tuple[torch.Tensor, torch.Tensor],
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence token by token in FP64: the results and the last state [heads, value, key]."""
    q, k, v = mixed.double().split([KEY_HEADS * SIZE, KEY_HEADS * SIZE, VALUE_HEADS * SIZE], dim=1)
    group = VALUE_HEADS // KEY_HEADS
    q, k = (t.view(-1, KEY_HEADS, SIZE).repeat_interleave(group, 1) for t in (q, k))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    v, (a, b), (a_log, dt_bias) = v.view(-1, VALUE_HEADS, SIZE), gates, rates
    decay = (-a_log.double().exp() * functional.softplus(a.double() + dt_bias)).exp()
    beta, state, results = b.double().sigmoid(), state.double(), []
    for t in range(mixed.shape[0]):
        state = state * decay[t, :, None, None]
        update = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + update[..., None] * k[t, :, None]
        results.append(torch.einsum("hvk,hk->hv", state, q[t]) * SIZE**-0.5)
    return torch.stack(results), state


def starts() -> list[int]:
    return [sum(COUNTS[:at]) for at in range(len(COUNTS) + 1)]


def close(found: torch.Tensor, right: torch.Tensor, within: float) -> bool:
    return float((found.double() - right.double()).abs().max()) < within


@pytest.mark.parametrize("decodes", [0, 2])
def test_convolve_equals_the_convolution_of_every_sequence_and_keeps_its_end(decodes: int) -> None:
    weight, total = numbers(CHANNELS, WIDTH), sum(COUNTS) + PADDING
    wide = numbers(total, CHANNELS + 64, seed=1)
    x = wide[:, :CHANNELS]  # beside a gate, as the projection gives it
    pages = torch.full((SLOTS, WIDTH - 1, CHANNELS), math.nan)
    for place, is_carried in zip(PLACES, CARRIED, strict=True):
        if is_carried:
            pages[place] = numbers(WIDTH - 1, CHANNELS, seed=place)
    before = pages.clone()

    step = batch([*COUNTS, 0], [*PLACES, 0], [*CARRIED, True], decodes)
    found = gdn_ops.convolve(x, weight, pages.transpose(-1, -2), step, silu=True)

    for at, place in enumerate(PLACES):
        begin, end = starts()[at : at + 2]
        past = before[place] if CARRIED[at] else torch.zeros(WIDTH - 1, CHANNELS)
        assert close(found[begin:end], convolved(x[begin:end], weight, past.T), 1e-5)
        assert torch.equal(pages[place], torch.cat([past, x[begin:end]])[-(WIDTH - 1) :])
    untouched = [slot for slot in range(SLOTS) if slot not in PLACES]
    assert pages[untouched].isnan().all()


@pytest.mark.parametrize("decodes", [0, 2])
def test_recur_equals_the_rule_token_by_token_and_keeps_the_state(decodes: int) -> None:
    total = sum(COUNTS) + PADDING
    mixed, ba = numbers(total, CHANNELS, seed=2), numbers(total, 2 * VALUE_HEADS, seed=3)
    gates, rates = (ba[:, VALUE_HEADS:], ba[:, :VALUE_HEADS]), (numbers(6) - 1, numbers(6, seed=5))
    pages = torch.full((SLOTS, VALUE_HEADS, SIZE, SIZE), math.nan)
    for place, is_carried in zip(PLACES, CARRIED, strict=True):
        if is_carried:
            pages[place] = numbers(VALUE_HEADS, SIZE, SIZE, seed=place)
    before = pages.clone()

    step = batch([*COUNTS, 0], [*PLACES, 0], [*CARRIED, True], decodes)
    found = gdn_ops.recur(mixed, gates, rates, pages, step, key_heads=KEY_HEADS)

    for at, place in enumerate(PLACES):
        begin, end = starts()[at : at + 2]
        past = before[place] if CARRIED[at] else torch.zeros_like(before[place])
        own = tuple(gate[begin:end] for gate in gates)
        results, state = recurred(mixed[begin:end], (own[0], own[1]), rates, past)
        assert close(found[begin:end], results, 1e-4)
        assert close(pages[place], state, 1e-4)
    assert not found[sum(COUNTS) :].any()
    untouched = [slot for slot in range(SLOTS) if slot not in PLACES]
    assert pages[untouched].isnan().all()


@pytest.mark.parametrize("sigmoid", [False, True])
def test_gated_norm_equals_norm_times_gate(sigmoid: bool) -> None:
    x, wide, weight = numbers(5, 6, SIZE), numbers(5, 640 + 6 * SIZE, seed=1), numbers(SIZE, seed=2)
    z = wide[:, 640:].view(5, 6, SIZE)

    found = gdn_ops.gated_norm(x, z, weight, 1e-6, sigmoid=sigmoid)

    norm = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    gate = torch.sigmoid(z.double()) if sigmoid else functional.silu(z.double())
    assert close(found, norm * weight.double() * gate, 1e-5)


def test_step_without_tokens_gives_nothing() -> None:
    step = batch([0], [1], [False], 1)
    state = torch.zeros(SLOTS, VALUE_HEADS, SIZE, SIZE)
    empty, gate = torch.empty(0, CHANNELS), torch.empty(0, VALUE_HEADS)
    rates = (torch.zeros(VALUE_HEADS), torch.zeros(VALUE_HEADS))
    past = torch.zeros(SLOTS, CHANNELS, WIDTH - 1)

    mixed = gdn_ops.convolve(empty, torch.zeros(CHANNELS, WIDTH), past, step, silu=True)
    found = gdn_ops.recur(mixed, (gate, gate), rates, state, step, key_heads=KEY_HEADS)

    assert found.shape == (0, VALUE_HEADS, SIZE)
    assert gdn_ops.gated_norm(found, found, torch.ones(SIZE), 1e-6, sigmoid=False).shape[0] == 0


def test_operations_have_shapes_without_data() -> None:
    with FakeTensorMode():
        step = batch([3], [1], [False], 0)
        state, rate = torch.empty(SLOTS, VALUE_HEADS, SIZE, SIZE), torch.empty(VALUE_HEADS)
        x, gate = torch.empty(3, CHANNELS), torch.empty(3, VALUE_HEADS)
        past = torch.empty(SLOTS, CHANNELS, WIDTH - 1)

        mixed = gdn_ops.convolve(x, torch.empty(CHANNELS, WIDTH), past, step, silu=True)
        found = gdn_ops.recur(mixed, (gate, gate), (rate, rate), state, step, key_heads=2)
        gated = gdn_ops.gated_norm(found, found, torch.empty(SIZE), 1e-6, sigmoid=False)

    assert (mixed.shape, found.shape, gated.shape) == (x.shape, (3, 6, SIZE), (3, 6, SIZE))


def test_workspace_of_the_longest_step_needs_no_state_in_memory() -> None:
    mixed = torch.empty(4096, CHANNELS)
    state = torch.empty(1, VALUE_HEADS, SIZE, SIZE, device="meta")

    assert gdn_ops.workspace_bytes(mixed, state, key_heads=KEY_HEADS, sequences=16) >= 0
