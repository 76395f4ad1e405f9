"""One right call of the gated delta rule and its neighbours, and what spoils each."""

from __future__ import annotations

import ctypes
from typing import Any

from appliance.nvfp4 import gdn
from appliance.nvfp4.abi import Status

ODD = "odd"  # the address plus one byte
SMALL = "small"  # one byte or element too few
HUGE = 2**40


def _batch(struct: str) -> tuple[tuple[str, object, Status], ...]:
    cases = (
        ("tokens", 0, Status.ESHAPE),
        ("tokens", HUGE, Status.ESHAPE),
        ("sequences", 0, Status.ESHAPE),
        ("sequences", 65536, Status.ESHAPE),
        ("decode_sequences", 3, Status.ESHAPE),
        ("decode_sequences", -1, Status.ESHAPE),
        ("query_start", None, Status.ENULL),
        ("query_start", ODD, Status.EALIGN),
        ("slots", None, Status.ENULL),
        ("slots", ODD, Status.EALIGN),
        ("first_slot", -1, Status.ESHAPE),
        ("first_slot", 4, Status.ESHAPE),
        ("slot_count", 0, Status.ESHAPE),
        ("slot_count", HUGE, Status.ESHAPE),
        ("state", None, Status.ENULL),
        ("state", ODD, Status.EALIGN),
        ("state_type", 3, Status.ETYPE),
        ("io_type", 3, Status.ETYPE),
        ("struct_size", 8, Status.EVERSION),
    )
    head = ((struct, None, Status.ENULL), (struct, ODD, Status.EALIGN))
    return head + tuple((f"{struct}.{field}", value, status) for field, value, status in cases)


_DELTA_SIZES = (
    ("delta.gate_type", 0, Status.ETYPE),
    ("delta.a_log_type", 3, Status.ETYPE),
    ("delta.dt_bias_type", 9, Status.ETYPE),
    ("delta.normalize", 2, Status.ETYPE),
    ("delta.scale", 0.0, Status.ESHAPE),
    ("delta.scale", float("inf"), Status.ESHAPE),
    ("delta.max_query_len", 0, Status.ESHAPE),
    ("delta.k_heads", 0, Status.ESHAPE),
    ("delta.k_heads", 3, Status.ESHAPE),
    ("delta.v_heads", 0, Status.ESHAPE),
    ("delta.v_heads", 4097, Status.ESHAPE),
    ("delta.k_dim", 60, Status.ESHAPE),
    ("delta.k_dim", 264, Status.ESHAPE),
    ("delta.v_dim", 0, Status.ESHAPE),
    ("delta.v_dim", 68, Status.ESHAPE),
)

GDN_WRONG: dict[str, tuple[tuple[str, object, Status], ...]] = {
    "nvfp4_causal_conv": (
        *_batch("conv"),
        ("conv.weight_type", 3, Status.ETYPE),
        ("conv.width", 1, Status.ESHAPE),
        ("conv.width", 5, Status.ESHAPE),
        ("conv.silu", 2, Status.ETYPE),
        ("conv.channels", 0, Status.ESHAPE),
        ("conv.channels", 12, Status.ESHAPE),
        ("conv.channels", HUGE, Status.ESHAPE),
        ("conv.x", None, Status.ENULL),
        ("conv.x", ODD, Status.EALIGN),
        ("conv.x_stride", 8, Status.ESTRIDE),
        ("conv.x_stride", 17, Status.EALIGN),
        ("conv.y", None, Status.ENULL),
        ("conv.y_stride", 8, Status.ESTRIDE),
        ("conv.weight", None, Status.ENULL),
        ("conv.weight", ODD, Status.EALIGN),
        ("conv.bias", ODD, Status.EALIGN),
        ("conv.state_channel_stride", 0, Status.ESTRIDE),
        ("conv.state_time_stride", 0, Status.ESTRIDE),
        ("conv.state_slot_stride", 15, Status.ESTRIDE),
        ("conv.state_slot_stride", 2**62, Status.ESTRIDE),
    ),
    "nvfp4_gated_delta_workspace_bytes": (
        *_DELTA_SIZES,
        ("delta", None, Status.ENULL),
        ("delta.struct_size", 8, Status.EVERSION),
        ("bytes", None, Status.ENULL),
    ),
    "nvfp4_gated_delta": (
        *_batch("delta"),
        *_DELTA_SIZES,
        ("delta.q", None, Status.ENULL),
        ("delta.q", ODD, Status.EALIGN),
        ("delta.q_stride", 8, Status.ESTRIDE),
        ("delta.k", None, Status.ENULL),
        ("delta.k_stride", 65, Status.EALIGN),
        ("delta.v", None, Status.ENULL),
        ("delta.v_stride", 64, Status.ESTRIDE),
        ("delta.a", None, Status.ENULL),
        ("delta.a", ODD, Status.EALIGN),
        ("delta.a_stride", 1, Status.ESTRIDE),
        ("delta.b", None, Status.ENULL),
        ("delta.b_stride", -2, Status.ESTRIDE),
        ("delta.a_log", None, Status.ENULL),
        ("delta.a_log", ODD, Status.EALIGN),
        ("delta.dt_bias", None, Status.ENULL),
        ("delta.state_slot_stride", 8191, Status.ESTRIDE),
        ("delta.state_slot_stride", 8193, Status.EALIGN),
        ("delta.out", None, Status.ENULL),
        ("delta.out_stride", 8, Status.ESTRIDE),
        ("workspace", None, Status.ENULL),
        ("workspace", ODD, Status.EALIGN),
        ("workspace_bytes", SMALL, Status.EWORKSPACE),
        ("workspace_bytes", -1, Status.EWORKSPACE),
    ),
    "nvfp4_gated_rms_norm": (
        ("norm", None, Status.ENULL),
        ("norm", ODD, Status.EALIGN),
        ("norm.struct_size", 0, Status.EVERSION),
        ("norm.io_type", 3, Status.ETYPE),
        ("norm.weight_type", 0, Status.ETYPE),
        ("norm.gate", 0, Status.ETYPE),
        ("norm.gate", 3, Status.ETYPE),
        ("norm.eps", -1.0, Status.ESHAPE),
        ("norm.eps", float("nan"), Status.ESHAPE),
        ("norm.reserved", 1, Status.EVERSION),
        ("norm.tokens", 0, Status.ESHAPE),
        ("norm.heads", 0, Status.ESHAPE),
        ("norm.hidden", 12, Status.ESHAPE),
        ("norm.hidden", 520, Status.ESHAPE),
        ("norm.weight", None, Status.ENULL),
        ("norm.x", None, Status.ENULL),
        ("norm.x_stride", 8, Status.ESTRIDE),
        ("norm.z", ODD, Status.EALIGN),
        ("norm.z_stride", 33, Status.EALIGN),
        ("norm.y", None, Status.ENULL),
        ("norm.y_stride", 8, Status.ESTRIDE),
    ),
}


def gdn_arguments(
    written: int, inputs: int, integers: int, *, workspace: int, library: Any
) -> dict[str, dict[str, Any]]:
    """Two sequences of a token and of two; `integers` holds zeros.

    All sequences are empty for the host's sake: only the arguments are looked at.
    """
    batch = {"tokens": 3, "sequences": 2, "decode_sequences": 1, "query_start": integers}
    batch |= {"slots": integers, "has_initial_state": inputs, "first_slot": 1, "slot_count": 3}
    conv = gdn.Conv(
        io_type=1, state_type=1, weight_type=1, width=4, silu=1, channels=16, x=inputs,
        x_stride=16, y=written, y_stride=16, weight=inputs, bias=inputs, state=written + 4096,
        state_slot_stride=48, state_channel_stride=3, state_time_stride=1, **batch,
    )  # fmt: skip
    delta = gdn.Delta(
        io_type=1, gate_type=1, a_log_type=2, dt_bias_type=1, state_type=2, normalize=1,
        scale=0.125, max_query_len=20, k_heads=1, v_heads=2, k_dim=64, v_dim=64, q=inputs,
        q_stride=64, k=inputs, k_stride=64, v=inputs, v_stride=128, a=inputs, a_stride=2,
        b=inputs, b_stride=2, a_log=inputs, dt_bias=inputs, state=written,
        state_slot_stride=8192, out=written, out_stride=128, **batch,
    )  # fmt: skip
    norm = gdn.GateNorm(
        io_type=1, weight_type=2, gate=1, eps=1e-6, tokens=2, heads=2, hidden=16, weight=inputs,
        x=inputs, x_stride=32, z=inputs, z_stride=32, y=written, y_stride=32,
    )  # fmt: skip
    return {
        "nvfp4_causal_conv": {"conv": conv, "stream": None},
        "nvfp4_gated_delta_workspace_bytes": {"delta": delta, "bytes": ctypes.c_int64(0)},
        "nvfp4_gated_delta": {
            "delta": delta,
            "workspace": workspace,
            "workspace_bytes": gdn.workspace_bytes(library, delta),
            "stream": None,
        },
        "nvfp4_gated_rms_norm": {"norm": norm, "stream": None},
    }
