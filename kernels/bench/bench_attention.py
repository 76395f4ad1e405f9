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

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY = Path(__file__).resolve().parents[2]
CASES = REPOSITORY / "tests" / "kernels" / "vsim"
# PYTHONSAFEPATH leaves a script's own folder out.
sys.path.insert(0, str(CASES))

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


def place(kind: str, sizes: list[int]) -> Callable[[], None]:
    """The timed call over a cache of zeros: blocks of 16 tokens in random order, NHD."""
    import numpy as np  # noqa: PLC0415 - not needed by the process that starts the model
    from sm70_rig import CudartMemory, Rig  # noqa: PLC0415

    from appliance.nvfp4 import attention as binding  # noqa: PLC0415
    from appliance.nvfp4.library import Library  # noqa: PLC0415

    head_dim, q_heads, kv_heads, keys, last = sizes
    sequences, query_len = (last, 1) if kind == "decode" else (1, last)
    rig = Rig(Library(Path(os.environ["BENCH_LIBRARY"])), CudartMemory())
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


def on_model(options: argparse.Namespace, arguments: list[str], **extra: str) -> str:
    """Output of a Python program whose CUDA run time is the model."""
    environment = dict(os.environ, BENCH_LIBRARY=str(options.library), SIM_TIMEOUT="3600", **extra)
    environment["PYTHONPATH"] = f"{REPOSITORY}:{CASES}"
    command = [str(options.vsim / "run"), sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


def check(options: argparse.Namespace) -> None:
    """Stop where a kernel is wrong."""
    from sm70_attention_cases import ATTENTION_CASES  # noqa: PLC0415

    arguments = [str(CASES / "sm70_run.py"), str(options.library), *ATTENTION_CASES]
    output = on_model(options, arguments, VSIM_FUNC="1")
    (line,) = (each for each in output.splitlines() if each.startswith("RESULTS "))
    wrong = {k: v for k, v in json.loads(line.removeprefix("RESULTS ")).items() if v != "ok"}
    if wrong:
        raise SystemExit(f"a kernel is wrong, nothing was timed: {wrong}")


def row_of(options: argparse.Namespace, case: str) -> dict[str, Any]:
    """Time a case, all of its kernels; of decode the second of two calls."""
    kind, _, text = case.partition(":")
    head_dim, q_heads, kv_heads, keys, last = map(int, text.split("x"))
    output = on_model(
        options, [__file__, "--place", case], VSIM_NOHMMA="1", VSIM_PAR=f"nsm={options.sms}"
    )
    times = [float(each) for each in re.findall(r"cycles=\d+\s+t=([\d.]+)us", output)]
    us = sum(times[len(times) // 2 :] if kind == "decode" else times)
    row: dict[str, Any] = {"case": case, "us": round(us, 2), "multiprocessors": options.sms}
    if kind == "decode":
        moved = last * keys * kv_heads * head_dim * 4
        row["read_gb_s"] = round(moved / us / 1e3, 1)
        row["of_ceiling"] = round(moved / us / 1e3 / READ_CEILING_GB_S, 3)
    else:
        seen = last * (keys - last) + last * (last + 1) // 2
        tflops = 4 * head_dim * q_heads * seen / us / 1e6
        row["tflops"] = round(tflops * MULTIPROCESSORS / options.sms, 1)
    return row


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path, nargs="?")
    parser.add_argument("--vsim", type=Path)
    parser.add_argument("--only", help="cases, comma-separated")
    parser.add_argument("--sms", type=int, default=MULTIPROCESSORS, help="of the model")
    parser.add_argument("--place", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Check, time, and print; or be the timed process."""
    options = parse()
    if options.place:
        kind, _, text = options.place.partition(":")
        call = place(kind, [int(each) for each in text.split("x")])
        call()
        if kind == "decode":
            call()
        return 0
    check(options)
    rows = []
    for case in options.only.split(",") if options.only else DEFAULT:
        rows.append(row_of(options, case))
        sys.stderr.write(json.dumps(rows[-1]) + "\n")
    machine = "simulated V100, 1530/877 MHz, cold L2, +-15 %"
    sys.stdout.write(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
