"""The gated delta rule as `torch.library` operations over the C ABI.

Each is one opaque node of known result shape. Nothing is synchronised, memory comes from torch's
allocator, so graphs capture them. Batches, slots and states are those of nvfp4_gdn.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from appliance.nvfp4 import abi, gdn
from appliance.vllm_plugin.device import address_of, library_of, room, stream_of, type_of
from appliance.vllm_plugin.registry import define

if TYPE_CHECKING:
    from appliance.nvfp4.library import Library

FIRST_SLOT = 1
"""Slot 0 is the engine's null block, which the padding of a graph points to."""


@dataclass
class Batch:
    """One step of a batch, the same for every layer of a group.

    Attributes:
        decodes: Leading sequences with at most one token each.
        longest: No sequence has more tokens in this step.
        query_start: int32 [sequences + 1], first row of each.
        slots: int32 [sequences], where each keeps its state; one below `FIRST_SLOT` is padding.
        carried: bool [sequences], whether the slot holds the state of the sequence already.
    """

    decodes: int
    longest: int
    query_start: torch.Tensor
    slots: torch.Tensor
    carried: torch.Tensor


def convolve(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, batch: Batch, *, silu: bool
) -> torch.Tensor:
    """Return the causal convolution of each channel, activated, and keep the last inputs.

    Args:
        x: [tokens, channels]; may be columns of a wider matrix.
        weight: [channels, width].
        state: [slots, channels, width - 1] by any strides; changed at the slots of the batch.
        batch: The step.
        silu: Apply silu to the sums.

    Returns:
        [tokens, channels], contiguous; rows of no sequence hold anything.

    Raises:
        LibraryError: If the library refuses the call.
    """
    result = torch.ops.nvfp4.gdn_conv(
        *(x, weight, state, batch.query_start, batch.slots, batch.carried),
        *(batch.decodes, silu),
    )
    return cast("torch.Tensor", result)


def recur(
    mixed: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor],
    rates: tuple[torch.Tensor, torch.Tensor],
    state: torch.Tensor,
    batch: Batch,
    *,
    key_heads: int,
) -> torch.Tensor:
    """Return what the gated delta rule gives for each token, and keep the states.

    Args:
        mixed: [tokens, 2 * key_heads * key size + value heads * value size]: q, k and v.
        gates: a and b, each [tokens, value heads] by any stride of rows.
        rates: A_log and dt_bias, each [value heads].
        state: [slots, value heads, value size, key size]; changed at the slots of the batch.
        batch: The step.
        key_heads: Heads of q and of k.

    Returns:
        [tokens, value heads, value size]; zeros in rows of no sequence.

    Raises:
        LibraryError: If the library refuses the call, or has no such heads.
    """
    result = torch.ops.nvfp4.gdn_core(
        *(mixed, *gates, *rates, state, batch.query_start, batch.slots, batch.carried),
        *(batch.decodes, batch.longest, key_heads),
    )
    return cast("torch.Tensor", result)


def gated_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, epsilon: float, *, sigmoid: bool
) -> torch.Tensor:
    """Return x / rms(x) * weight * gate(z) for each head, in FP32 with one rounding.

    Args:
        x: [tokens, heads, size].
        z: [tokens, heads, size] by any stride of tokens.
        weight: [size].
        epsilon: Added to the mean square.
        sigmoid: The gate is sigmoid(z), else silu(z).

    Raises:
        LibraryError: If the library refuses the call.
    """
    result = torch.ops.nvfp4.gdn_norm(x, z, weight, epsilon, sigmoid)
    return cast("torch.Tensor", result)


def workspace_bytes(
    mixed: torch.Tensor, state: torch.Tensor, *, key_heads: int, sequences: int
) -> int:
    """Return the workspace that suffices for every step of so many tokens and sequences."""
    delta = _sizes(mixed, state, key_heads)
    delta.sequences, delta.max_query_len = sequences, mixed.shape[0]
    return gdn.workspace_bytes(library_of(mixed.device), delta)


def _sizes(mixed: torch.Tensor, state: torch.Tensor, key_heads: int) -> gdn.Delta:
    _, value_heads, value_size, key_size = state.shape
    return gdn.Delta(
        io_type=type_of(mixed),
        gate_type=type_of(mixed),
        a_log_type=abi.Type.F32,
        dt_bias_type=abi.Type.F32,
        state_type=type_of(state),
        normalize=1,
        scale=key_size**-0.5,
        tokens=mixed.shape[0],
        k_heads=key_heads,
        v_heads=value_heads,
        k_dim=key_size,
        v_dim=value_size,
        first_slot=FIRST_SLOT,
        slot_count=state.shape[0],
        state_slot_stride=state.stride(0),
    )


def _gdn_conv(  # noqa: PLR0917 - the operation's schema
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    query_start: torch.Tensor,
    slots: torch.Tensor,
    carried: torch.Tensor,
    decodes: int,
    silu: bool,
) -> torch.Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.shape[0]:
        return result
    conv = gdn.Conv(
        io_type=type_of(x),
        state_type=type_of(state),
        weight_type=type_of(weight),
        width=weight.shape[1],
        silu=int(silu),
        tokens=x.shape[0],
        sequences=slots.shape[0],
        decode_sequences=decodes,
        channels=x.shape[1],
        x=x.data_ptr(),
        x_stride=x.stride(0),
        y=result.data_ptr(),
        y_stride=result.stride(0),
        weight=weight.data_ptr(),
        query_start=query_start.data_ptr(),
        slots=slots.data_ptr(),
        has_initial_state=carried.data_ptr(),
        first_slot=FIRST_SLOT,
        slot_count=state.shape[0],
        state=state.data_ptr(),
        state_slot_stride=state.stride(0),
        state_channel_stride=state.stride(1),
        state_time_stride=state.stride(2),
    )
    gdn.causal_conv(library_of(x.device), conv, stream=stream_of(x.device))
    return result


def _gdn_core(  # noqa: PLR0917 - the operation's schema
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    query_start: torch.Tensor,
    slots: torch.Tensor,
    carried: torch.Tensor,
    decodes: int,
    longest: int,
    key_heads: int,
) -> torch.Tensor:
    delta = _sizes(mixed, state, key_heads)
    result = mixed.new_zeros((delta.tokens, delta.v_heads, delta.v_dim))
    if not delta.tokens:
        return result
    delta.gate_type = type_of(a)
    delta.a_log_type, delta.dt_bias_type = type_of(a_log), type_of(dt_bias)
    delta.sequences, delta.decode_sequences = slots.shape[0], decodes
    delta.max_query_len = longest
    keys = key_heads * delta.k_dim
    q, k, v = mixed, mixed[:, keys:], mixed[:, 2 * keys :]
    for name, tensor in {"q": q, "k": k, "v": v, "a": a, "b": b, "out": result}.items():
        setattr(delta, name, tensor.data_ptr())
        setattr(delta, f"{name}_stride", tensor.stride(0))
    delta.a_log, delta.dt_bias = a_log.data_ptr(), dt_bias.data_ptr()
    delta.query_start, delta.slots = query_start.data_ptr(), slots.data_ptr()
    delta.has_initial_state, delta.state = carried.data_ptr(), state.data_ptr()
    _run(library_of(mixed.device), delta, mixed.device)
    return result


def _run(library: Library, delta: gdn.Delta, device: torch.device) -> None:
    workspace = room(gdn.workspace_bytes(library, delta), device)
    gdn.gated_delta(
        library,
        delta,
        workspace=address_of(workspace),
        workspace_bytes=workspace.numel(),
        stream=stream_of(device),
    )


def _gdn_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, epsilon: float, sigmoid: bool
) -> torch.Tensor:
    tokens, heads, size = x.shape
    result = torch.empty((tokens, heads, size), dtype=x.dtype, device=x.device)
    if not tokens:
        return result
    norm = gdn.GateNorm(
        io_type=type_of(x),
        weight_type=type_of(weight),
        gate=gdn.Gate.SIGMOID if sigmoid else gdn.Gate.SILU,
        eps=epsilon,
        tokens=tokens,
        heads=heads,
        hidden=size,
        weight=weight.data_ptr(),
        x=x.data_ptr(),
        x_stride=x.stride(0),
        z=z.data_ptr(),
        z_stride=z.stride(0),
        y=result.data_ptr(),
        y_stride=result.stride(0),
    )
    gdn.gated_rms_norm(library_of(x.device), norm, stream=stream_of(x.device))
    return result


def _fake_conv(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


def _fake_core(  # noqa: PLR0917 - the operation's schema
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    *_: object,
) -> torch.Tensor:
    del a, b, a_log, dt_bias
    return mixed.new_empty((mixed.shape[0], state.shape[1], state.shape[2]))


def _fake_norm(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


_MIXED = "Tensor mixed, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias"
_STEP = "Tensor query_start, Tensor slots, Tensor carried, int decodes"
define(
    "nvfp4",
    f"gdn_conv(Tensor x, Tensor weight, Tensor(a!) state, {_STEP}, bool silu) -> Tensor",
    _gdn_conv,
    _fake_conv,
)
define(
    "nvfp4",
    f"gdn_core({_MIXED}, Tensor(a!) state, {_STEP}, int longest, int key_heads) -> Tensor",
    _gdn_core,
    _fake_core,
)
define(
    "nvfp4",
    "gdn_norm(Tensor x, Tensor z, Tensor weight, float epsilon, bool sigmoid) -> Tensor",
    _gdn_norm,
    _fake_norm,
)
