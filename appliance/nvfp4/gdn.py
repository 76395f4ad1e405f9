"""The gated delta rule and what stands around it: kernels/include/nvfp4_gdn.h.

Addresses are integers as `ndarray.ctypes.data` and `Tensor.data_ptr()` give them; the header says
what the fields mean.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import TYPE_CHECKING

from appliance.nvfp4.abi import Sized

if TYPE_CHECKING:
    from appliance.nvfp4.calls import Calls

__all__ = [
    "SIGNATURES",
    "Conv",
    "Delta",
    "Gate",
    "GateNorm",
    "causal_conv",
    "gated_delta",
    "gated_rms_norm",
    "workspace_bytes",
]

_INT = ctypes.c_int32
_UINT = ctypes.c_uint32
_LONG = ctypes.c_int64
_FLOAT = ctypes.c_float
_POINTER = ctypes.c_void_p


class Gate(IntEnum):
    """What a gated norm makes of its gate."""

    SILU = 1
    SIGMOID = 2


class Conv(Sized):
    """nvfp4_conv: a causal convolution of x [tokens, channels] with a state for each sequence."""

    tokens: int
    sequences: int
    channels: int
    _fields_ = (
        ("struct_size", _UINT),
        ("io_type", _INT),
        ("state_type", _INT),
        ("weight_type", _INT),
        ("width", _INT),
        ("silu", _INT),
        ("tokens", _LONG),
        ("sequences", _LONG),
        ("decode_sequences", _LONG),
        ("channels", _LONG),
        ("x", _POINTER),
        ("x_stride", _LONG),
        ("y", _POINTER),
        ("y_stride", _LONG),
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("query_start", _POINTER),
        ("slots", _POINTER),
        ("has_initial_state", _POINTER),
        ("first_slot", _LONG),
        ("slot_count", _LONG),
        ("state", _POINTER),
        ("state_slot_stride", _LONG),
        ("state_channel_stride", _LONG),
        ("state_time_stride", _LONG),
    )


class Delta(Sized):
    """nvfp4_delta: the gated delta rule over the tokens of each sequence."""

    tokens: int
    sequences: int
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    _fields_ = (
        ("struct_size", _UINT),
        ("io_type", _INT),
        ("gate_type", _INT),
        ("a_log_type", _INT),
        ("dt_bias_type", _INT),
        ("state_type", _INT),
        ("normalize", _INT),
        ("scale", _FLOAT),
        ("tokens", _LONG),
        ("sequences", _LONG),
        ("decode_sequences", _LONG),
        ("max_query_len", _LONG),
        ("k_heads", _LONG),
        ("v_heads", _LONG),
        ("k_dim", _LONG),
        ("v_dim", _LONG),
        ("q", _POINTER),
        ("q_stride", _LONG),
        ("k", _POINTER),
        ("k_stride", _LONG),
        ("v", _POINTER),
        ("v_stride", _LONG),
        ("a", _POINTER),
        ("a_stride", _LONG),
        ("b", _POINTER),
        ("b_stride", _LONG),
        ("a_log", _POINTER),
        ("dt_bias", _POINTER),
        ("query_start", _POINTER),
        ("slots", _POINTER),
        ("has_initial_state", _POINTER),
        ("first_slot", _LONG),
        ("slot_count", _LONG),
        ("state", _POINTER),
        ("state_slot_stride", _LONG),
        ("out", _POINTER),
        ("out_stride", _LONG),
    )


class GateNorm(Sized):
    """nvfp4_gate_norm: a norm of every head of every token, times its gate."""

    tokens: int
    heads: int
    hidden: int
    _fields_ = (
        ("struct_size", _UINT),
        ("io_type", _INT),
        ("weight_type", _INT),
        ("gate", _INT),
        ("eps", _FLOAT),
        ("reserved", _INT),
        ("tokens", _LONG),
        ("heads", _LONG),
        ("hidden", _LONG),
        ("weight", _POINTER),
        ("x", _POINTER),
        ("x_stride", _LONG),
        ("z", _POINTER),
        ("z_stride", _LONG),
        ("y", _POINTER),
        ("y_stride", _LONG),
    )


SIGNATURES: dict[str, tuple[type[object], ...]] = {
    "nvfp4_causal_conv": (_POINTER, _POINTER),
    "nvfp4_gated_delta_workspace_bytes": (_POINTER, _POINTER),
    "nvfp4_gated_delta": (_POINTER, _POINTER, _LONG, _POINTER),
    "nvfp4_gated_rms_norm": (_POINTER, _POINTER),
}
"""Argument types of every call of the header, as `abi.SIGNATURES`."""


def causal_conv(library: Calls, conv: Conv, *, stream: int = 0) -> None:
    """Convolve the tokens of each sequence, and keep its last inputs in the state."""
    library.call("nvfp4_causal_conv", ctypes.byref(conv), stream)


def workspace_bytes(library: Calls, delta: Delta) -> int:
    """Return the bytes that suffice for these sizes and smaller ones; pointers are not read.

    Raises:
        LibraryError: NVFP4_EUNSUPPORTED where the library has no kernel for the sizes.
    """
    return library.query("nvfp4_gated_delta_workspace_bytes", ctypes.byref(delta))


def gated_delta(
    library: Calls,
    delta: Delta,
    *,
    workspace: int = 0,
    workspace_bytes: int = 0,
    stream: int = 0,
) -> None:
    """Run the recurrence over the tokens of each sequence, and keep its state."""
    library.call("nvfp4_gated_delta", ctypes.byref(delta), workspace, workspace_bytes, stream)


def gated_rms_norm(library: Calls, norm: GateNorm, *, stream: int = 0) -> None:
    """Normalise every head and multiply it with its gate."""
    library.call("nvfp4_gated_rms_norm", ctypes.byref(norm), stream)
