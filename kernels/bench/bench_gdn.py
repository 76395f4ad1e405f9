#!/usr/bin/env python3
"""Times the gated delta rule of the sm_70 library on the modelled V100; JSON on stdout.

Every check of tests/kernels/vsim/sm70_gdn_cases.py runs first, in the model's functional mode; a
wrong kernel is not timed. The library must be linked with the shared CUDA run time. Figures are
simulated, within about 15 %; never a measurement.

Cases: `decode:K_HEADSxV_HEADSxDIMxSEQUENCES`, `steps:` and `prefill:` the same with TOKENS of one
sequence, token by token and in chunks; `conv:CHANNELSxSEQUENCESxTOKENS` of width 4;
`norm:TOKENSxHEADSxDIM`. All of them take some ten minutes. The last writes of a call, up to 6 MB,
are still in the L2 cache when it ends: small cases may exceed what the model copies at most.

Usage: bench_gdn.py LIBRARY --vsim FOLDER [--only decode:16x48x128x1,...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# PYTHONSAFEPATH leaves a script's own folder out.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tests/kernels/vsim")]

import numpy as np
from bench_on_model import Case, check, options_of, print_rows, time_case
from bench_report import cases_of
from sm70_gdn_cases import GDN_CASES
from sm70_rig import CudartMemory, Rig

from appliance.nvfp4 import gdn
from appliance.nvfp4.library import Library

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

DEFAULT = (
    *(f"decode:16x48x128x{n}" for n in (1, 8, 32)),
    *(f"decode:8x24x128x{n}" for n in (1, 8, 32)),
    "steps:8x24x128x64",
    "prefill:8x24x128x512",
    "prefill:8x24x128x2048",
    "prefill:16x48x128x2048",
    "conv:5120x1x1",
    "conv:5120x32x1",
    "conv:5120x1x2048",
    "norm:32x24x128",
    "norm:2048x24x128",
)
COPY_CEILING_GB_S = 808.0
"""What the model copies at most, reads and writes counted; its own copy program."""


def zeros(rig: Rig, *shape: int, size: int = 2) -> int:
    """Memory of that many elements; its content does not matter to time."""
    count = 1
    for each in shape:
        count *= each
    return int(rig.room(count * size))


def place_delta(rig: Rig, case: Case) -> Callable[[], None]:
    """The timed call of the delta rule; every sequence has a state."""
    kind, (k_heads, v_heads, dim, last) = case.kind, case.sizes
    sequences, tokens = (last, last) if kind == "decode" else (1, last)
    keys, values = k_heads * dim, v_heads * dim
    rng = np.random.default_rng(0)
    row = 2 * keys + values
    qkv = rig.put(rng.standard_normal((tokens, row)).astype(np.float16))
    call = gdn.Delta(
        io_type=1, gate_type=1, a_log_type=2, dt_bias_type=1, state_type=2, normalize=1,
        scale=dim**-0.5, tokens=tokens, sequences=sequences,
        decode_sequences=sequences if kind == "decode" else 0,
        max_query_len=1 if kind != "prefill" else tokens, k_heads=k_heads, v_heads=v_heads,
        k_dim=dim, v_dim=dim, q=qkv, q_stride=row, k=qkv + 2 * keys, k_stride=row,
        v=qkv + 4 * keys, v_stride=row, a=rig.put(np.zeros((tokens, v_heads), np.float16)),
        a_stride=v_heads, b=rig.put(np.zeros((tokens, v_heads), np.float16)), b_stride=v_heads,
        a_log=rig.put(np.zeros(v_heads, np.float32)),
        dt_bias=rig.put(np.zeros(v_heads, np.float16)),
        query_start=rig.put((np.arange(sequences + 1) * (tokens // sequences)).astype(np.int32)),
        slots=rig.put(np.arange(sequences, dtype=np.int32)), slot_count=sequences,
        state=rig.put(np.zeros((sequences, values * dim), np.float32)),
        state_slot_stride=values * dim, out=zeros(rig, tokens, values), out_stride=values,
    )  # fmt: skip
    needed = gdn.workspace_bytes(rig.library, call)
    workspace = rig.room(needed) if needed else 0
    return lambda: gdn.gated_delta(rig.library, call, workspace=workspace, workspace_bytes=needed)


def place_conv(rig: Rig, case: Case) -> Callable[[], None]:
    """The timed convolution; all sequences of one length, decode where that is 1."""
    channels, sequences, length = case.sizes
    tokens = sequences * length
    call = gdn.Conv(
        io_type=1, state_type=1, weight_type=1, width=4, silu=1, tokens=tokens,
        sequences=sequences, decode_sequences=sequences if length == 1 else 0, channels=channels,
        x=zeros(rig, tokens, channels), x_stride=channels, y=zeros(rig, tokens, channels),
        y_stride=channels, weight=zeros(rig, channels, 4),
        query_start=rig.put((np.arange(sequences + 1) * length).astype(np.int32)),
        slots=rig.put(np.arange(sequences, dtype=np.int32)), slot_count=sequences,
        state=zeros(rig, sequences, channels, 3), state_slot_stride=3 * channels,
        state_channel_stride=1, state_time_stride=channels,
    )  # fmt: skip
    return lambda: gdn.causal_conv(rig.library, call)


def place_norm(rig: Rig, case: Case) -> Callable[[], None]:
    """The timed norm with a SiLU gate."""
    tokens, heads, dim = case.sizes
    width = heads * dim
    x, z, y = (zeros(rig, tokens, width) for _ in range(3))
    call = gdn.GateNorm(
        io_type=1, weight_type=2, gate=1, eps=1e-6, tokens=tokens, heads=heads, hidden=dim,
        weight=zeros(rig, dim, size=4), x=x, x_stride=width, z=z, z_stride=width, y=y,
        y_stride=width,
    )  # fmt: skip
    return lambda: gdn.gated_rms_norm(rig.library, call)


PLACES = {"conv": place_conv, "norm": place_norm}


def moved_bytes(case: Case) -> int:
    """Bytes that a call has to move at least: states, or rows in and out."""
    kind, sizes = case.kind, case.sizes
    if kind == "decode":
        return sizes[3] * sizes[1] * sizes[2] * sizes[2] * 4 * 2
    if kind == "conv":
        channels, sequences, length = sizes
        return channels * 2 * (sequences * length * 2 + sequences * 6 + 4)
    return sizes[0] * sizes[1] * sizes[2] * 2 * 3


def call_count(case: Case) -> int:
    """The second of two calls is timed, of a prompt the only one."""
    return 1 if case.kind in {"prefill", "steps"} else 2


def row_of(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Time a case, all of its kernels."""
    case = Case.of(name)
    times = time_case(options, name, call_count(case))
    us = sum(times)
    row: dict[str, Any] = {"case": name, "us": round(us, 2)}
    if len(times) > 1:
        row["launches_us"] = [round(each, 2) for each in times]
    if case.kind in {"prefill", "steps"}:
        row["us_per_token"] = round(us / case.sizes[3], 3)
    else:
        rate = moved_bytes(case) / us / 1e3
        row |= {"gb_s": round(rate, 1), "of_ceiling": round(rate / COPY_CEILING_GB_S, 3)}
    return row


def main() -> int:
    """Check, time, and print; or be the timed process."""
    options = options_of(__doc__).parse_args()
    if options.place:
        case = Case.of(options.place)
        rig = Rig(Library(options.library), CudartMemory())
        call = PLACES.get(case.kind, place_delta)(rig, case)
        for _ in range(call_count(case)):
            call()
        return 0
    check(options, GDN_CASES)
    print_rows(row_of(options, name) for name in cases_of(options, DEFAULT))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
