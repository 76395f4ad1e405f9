#!/usr/bin/env python3
"""Times attention of the sm_70 library on the modelled V100; JSON on stdout, rows on stderr.

Every check of tests/kernels/vsim/sm70_attention_cases.py runs first, in the model's functional
mode; a wrong kernel is not timed. The library must be linked with the shared CUDA run time. Figures
are simulated, within about 15 %; never a measurement.

A case is `decode:DxQxKVxKEYSxSEQUENCES`, or `prefill:DxQxKVxKEYSxTOKENS` for the last TOKENS of
KEYS. A long prefill takes the model hours: `--sms 8` times it on a model with that many
multiprocessors and the whole memory, scales the rate to 80, and the row says so.

Usage: bench_attention.py LIBRARY --vsim FOLDER [--only decode:128x32x8x32768x1,...] [--sms N]
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
from sm70_attention_cases import ATTENTION_CASES
from sm70_rig import CudartMemory, Rig

from appliance.nvfp4 import attention as binding
from appliance.nvfp4.library import Library

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

DEFAULT = (
    "decode:64x32x8x32768x1",
    "decode:128x32x8x32768x1",
    "decode:256x16x2x32768x1",
    "decode:128x32x8x2048x16",
    "prefill:128x64x16x1024x320",
    "prefill:256x64x16x1024x320",
)
READ_CEILING_GB_S = 841.0
"""What the model reads at most; its own read program."""
MULTIPROCESSORS = 80
BLOCK = 16


def place(rig: Rig, case: Case) -> Callable[[], None]:
    """The timed call over a cache of zeros: blocks of 16 tokens in random order, NHD."""
    kind, (head_dim, q_heads, kv_heads, keys, last) = case.kind, case.sizes
    sequences, query_len = (last, 1) if kind == "decode" else (1, last)
    blocks, tokens = -(-keys // BLOCK), sequences * query_len
    token_stride, width = kv_heads * 2 * head_dim, q_heads * head_dim
    cache = rig.room(sequences * blocks * BLOCK * token_stride * 2)
    table = np.random.default_rng(0).permutation(sequences * blocks).astype(np.int32)
    call = binding.Attention(
        io_type=1,
        tokens=tokens,
        sequences=sequences,
        decode_sequences=sequences if kind == "decode" else 0,
        decode_query_len=1,
        max_seq_len=keys,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        query=rig.put(np.ones((tokens, width), np.float16)),
        query_stride=width,
        query_start=rig.put((np.arange(sequences + 1) * query_len).astype(np.int32)),
        seq_lens=rig.put(np.full(sequences, keys, np.int32)),
        block_table=rig.put(table),
        block_table_stride=blocks,
        k_cache=cache,
        v_cache=cache + head_dim * 2,
        block_size=BLOCK,
        cache_block_stride=BLOCK * token_stride,
        cache_token_stride=token_stride,
        cache_head_stride=2 * head_dim,
        out=rig.room(tokens * width * 2),
        out_stride=width,
    )
    needed = binding.workspace_bytes(rig.library, call)
    workspace = rig.room(needed) if needed else 0
    return lambda: binding.attend(rig.library, call, workspace=workspace, workspace_bytes=needed)


def call_count(case: Case) -> int:
    """Of decode the second of two calls is timed, of a prompt the only one."""
    return 2 if case.kind == "decode" else 1


def row_of(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Time a case, all of its kernels."""
    case = Case.of(name)
    head_dim, q_heads, kv_heads, keys, last = case.sizes
    settings = {"VSIM_NOHMMA": "1", "VSIM_PAR": f"nsm={options.sms}"}
    us = sum(time_case(options, name, call_count(case), **settings))
    row: dict[str, Any] = {"case": name, "us": round(us, 2), "multiprocessors": options.sms}
    if case.kind == "decode":
        moved = last * keys * kv_heads * head_dim * 4
        row["read_gb_s"] = round(moved / us / 1e3, 1)
        row["of_ceiling"] = round(moved / us / 1e3 / READ_CEILING_GB_S, 3)
    else:
        seen = last * (keys - last) + last * (last + 1) // 2
        tflops = 4 * head_dim * q_heads * seen / us / 1e6
        row["tflops"] = round(tflops * MULTIPROCESSORS / options.sms, 1)
    return row


def main() -> int:
    """Check, time, and print; or be the timed process."""
    parser = options_of(__doc__)
    parser.add_argument("--sms", type=int, default=MULTIPROCESSORS, help="of the model")
    options = parser.parse_args()
    if options.place:
        case = Case.of(options.place)
        call = place(Rig(Library(options.library), CudartMemory()), case)
        for _ in range(call_count(case)):
            call()
        return 0
    check(options, ATTENTION_CASES)
    print_rows(row_of(options, name) for name in cases_of(options, DEFAULT))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
