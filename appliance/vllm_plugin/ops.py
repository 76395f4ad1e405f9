"""The plugin's operations as `torch.library` custom ops over the C ABI, with fake implementations.

Compilers and graphs see each as one opaque node of known result shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch.nn import functional

from appliance.nvfp4 import host
from appliance.vllm_plugin.device import has_gpu_library
from appliance.vllm_plugin.registry import define
from appliance.vllm_plugin.route import WeightRoute

_ROUTES = {"cpu": frozenset({WeightRoute.DEQUANTIZED}), "cuda": frozenset(WeightRoute)}


_COPY_COST = 3
"""A copied matrix is read, written and read again; one that is used where it lies is read once."""

_FEW_TOKENS = 32
"""Up to so many the time of a product is that of reading its weights."""

_WORK_BYTES = 32 << 20
"""Of copies or products held at a time: half of the kernels' share of the plan's activations."""

_SUM_BYTES = 8
"""Of a result in FP32, before and after its share is applied."""


@dataclass(frozen=True)
class Routed:
    """Tokens, the matrices of a rank's experts, and which experts see which token.

    Attributes:
        x: [tokens, hidden].
        gate_up: [E, 2 I, hidden], gate rows first.
        down: [E, hidden, I].
        weights: float32 [tokens, top_k].
        ids: int32 [tokens, top_k], experts of this rank; -1 adds nothing.
        weight_input: The weight scales the expert's input instead of its output.
    """

    x: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    weight_input: bool


def routes(device: str) -> frozenset[WeightRoute]:
    """Return the routes that this installation can compute on a device.

    A GPU's need the library for GPUs; whether it loads, the first layer finds out.
    """
    if device == "cuda" and not has_gpu_library():
        return frozenset()
    return _ROUTES.get(device, frozenset())


def decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_globals: torch.Tensor,
    divisor: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Decode canonical NVFP4 tensors on the host with the reference library.

    Args:
        codes: uint8 [N, K/2], element 2j in the low nibble of byte j.
        scales: float8_e4m3fn [N, K/16], or float16 or float32 [N, K/group].
        row_globals: float32 [N].
        divisor: The globals divide; else they multiply.
        dtype: float16 or float32.

    Returns:
        [N, K] of `dtype`: the FP32 value nearest to the exact one, rounded once more for FP16.

    Raises:
        LibraryError: If the library is missing, or refuses scales or globals.
    """
    result = torch.ops.nvfp4.decode(codes, scales, row_globals, divisor, dtype)
    return cast("torch.Tensor", result)


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    weights: torch.Tensor,
    ids: torch.Tensor,
    weight_input: bool,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, each down(silu(gate(x)) * up(x)).

    Args:
        x: [tokens, hidden].
        gate_up: [E, 2 I, hidden], gate rows first.
        down: [E, hidden, I].
        weights: float32 [tokens, top_k].
        ids: int32 [tokens, top_k], experts of this rank; -1 adds nothing.
        weight_input: The weight scales the expert's input instead of its output.

    Returns:
        [tokens, hidden] of the type of x; the sum over experts is kept in FP32.
    """
    result = torch.ops.nvfp4.experts(x, gate_up, down, weights, ids, weight_input)
    return cast("torch.Tensor", result)


def _decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_globals: torch.Tensor,
    divisor: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    out = torch.empty((codes.shape[0], codes.shape[1] * 2), dtype=dtype)
    host.dequantize(
        codes.numpy(),
        (scales.view(torch.uint8) if scales.itemsize == 1 else scales).numpy(),
        row_globals.numpy(),
        out.numpy(),
        is_divisor=divisor,
    )
    return out


def _fake_decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_globals: torch.Tensor,
    divisor: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    del scales, row_globals, divisor
    return codes.new_empty((codes.shape[0], codes.shape[1] * 2), dtype=dtype)


def _experts(  # noqa: PLR0917 - the operation's schema
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    weight_input: bool,
) -> torch.Tensor:
    """Choose a way: none of them reads a number back from the device while a graph is captured."""
    routed = Routed(x, gate_up, down, weights, ids, weight_input)
    if x.is_cuda and _COPY_COST * ids.numel() <= down.shape[0]:
        return copied_experts(routed)
    if x.is_cuda and (len(x) <= _FEW_TOKENS or torch.cuda.is_current_stream_capturing()):
        return every_expert(routed)
    return sorted_experts(routed)


def sorted_experts(routed: Routed) -> torch.Tensor:
    """Sort tokens by expert and give each expert its own; the counts are read back once."""
    x, gate_up, down = routed.x, routed.gate_up, routed.down
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    chosen, shares = routed.ids.flatten(), routed.weights.flatten()
    order = chosen.argsort(stable=True)
    counted = torch.bincount(chosen + 1, minlength=down.shape[0] + 1)
    counts = cast("list[int]", counted.tolist())  # pyright: ignore[reportUnknownMemberType]
    begin = counts[0]  # those of other ranks come first
    for expert, count in enumerate(counts[1:]):
        if not count:
            continue
        places = order[begin : begin + count]
        begin += count
        tokens = places // routed.ids.shape[1]
        share = shares[places].unsqueeze(1)
        outputs = _expert(x[tokens], gate_up[expert], down[expert], share, routed.weight_input)
        result.index_add_(0, tokens, outputs)
    return result.to(x.dtype)


def every_expert(routed: Routed) -> torch.Tensor:
    """Let every expert see all tokens, many experts a product: nothing depends on the choice."""
    x, down, ids = routed.x, routed.down, routed.ids
    tokens, (count, _, width) = len(x), down.shape
    chosen = ids.unsqueeze(2) == torch.arange(count, dtype=ids.dtype, device=x.device)
    shares = (routed.weights.unsqueeze(2) * chosen).sum(dim=1).t().unsqueeze(2)
    absent = ~chosen.any(dim=1).t().unsqueeze(2)
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    row_bytes = 3 * width * x.element_size() + x.shape[1] * (x.element_size() + _SUM_BYTES)
    step = max(1, _WORK_BYTES // max(1, tokens * row_bytes))
    for begin in range(0, count, step):
        at = slice(begin, begin + step)
        inputs = x.expand(len(shares[at]), *x.shape)
        if routed.weight_input:
            inputs = inputs * shares[at].to(x.dtype)
        hidden = _gated(torch.bmm(inputs, routed.gate_up[at].transpose(1, 2)))
        outputs = torch.bmm(hidden, down[at].transpose(1, 2)).float()
        outputs = outputs if routed.weight_input else outputs * shares[at]
        result += outputs.masked_fill_(absent[at], 0.0).sum(dim=0)
    return result.to(x.dtype)


def copied_experts(routed: Routed) -> torch.Tensor:
    """Copy the matrices of each token's experts side by side: for few tokens and many experts."""
    x, gate_up, (tokens, top_k) = routed.x, routed.gate_up, routed.ids.shape
    chosen, shares = routed.ids.flatten().long(), routed.weights.reshape(-1, 1)
    inputs = x.unsqueeze(1).expand(tokens, top_k, x.shape[1]).reshape(tokens * top_k, -1)
    if routed.weight_input:
        inputs = inputs * shares.to(x.dtype)
    outputs = torch.empty(inputs.shape, dtype=torch.float32, device=x.device)
    matrix_bytes = gate_up.shape[1] * gate_up.shape[2] * gate_up.element_size()
    step = max(1, _WORK_BYTES // matrix_bytes)
    for begin in range(0, len(chosen), step):
        at = slice(begin, begin + step)
        experts = chosen[at].clamp(min=0)
        hidden = _gated(torch.bmm(gate_up[experts], inputs[at].unsqueeze(2)).squeeze(2))
        outputs[at] = torch.bmm(routed.down[experts], hidden.unsqueeze(2)).squeeze(2)
    if not routed.weight_input:
        outputs = outputs * shares
    outputs = outputs.masked_fill((chosen < 0).unsqueeze(1), 0.0)
    return outputs.view(tokens, top_k, -1).sum(dim=1).to(x.dtype)


def _expert(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shares: torch.Tensor,
    weight_input: bool,
) -> torch.Tensor:
    """Return one expert's share of the result, FP32; shares are [tokens, 1]."""
    inputs = x * shares.to(x.dtype) if weight_input else x
    hidden = _gated(functional.linear(inputs, gate_up))
    outputs = functional.linear(hidden, down).float()
    return outputs if weight_input else outputs * shares


def _gated(hidden: torch.Tensor) -> torch.Tensor:
    """Return silu of the first half of the last dimension times its second half."""
    gate, up = hidden.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _fake_experts(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x)


define(
    "nvfp4",
    "decode(Tensor codes, Tensor scales, Tensor row_globals, bool divisor, ScalarType dtype) "
    "-> Tensor",
    _decode,
    _fake_decode,
)
define(
    "nvfp4",
    "experts(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor ids, "
    "bool weight_input) -> Tensor",
    _experts,
    _fake_experts,
)
