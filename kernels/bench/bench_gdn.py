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


def zeros(rig: Any, *shape: int, size: int = 2) -> int:
    """Memory of that many elements; its content does not matter to time."""
    count = 1
    for each in shape:
        count *= each
    return int(rig.room(count * size))


def place_delta(rig: Any, kind: str, sizes: list[int]) -> Callable[[], None]:
    """The timed call of the delta rule; every sequence has a state."""
    import numpy as np  # noqa: PLC0415 - not needed by the process that starts the model

    from appliance.nvfp4 import gdn  # noqa: PLC0415

    k_heads, v_heads, dim, last = sizes
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


def place_conv(rig: Any, sizes: list[int]) -> Callable[[], None]:
    """The timed convolution; all sequences of one length, decode where that is 1."""
    import numpy as np  # noqa: PLC0415

    from appliance.nvfp4 import gdn  # noqa: PLC0415

    channels, sequences, length = sizes
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


def place_norm(rig: Any, sizes: list[int]) -> Callable[[], None]:
    """The timed norm with a SiLU gate."""
    from appliance.nvfp4 import gdn  # noqa: PLC0415

    tokens, heads, dim = sizes
    width = heads * dim
    x, z, y = (zeros(rig, tokens, width) for _ in range(3))
    call = gdn.GateNorm(
        io_type=1, weight_type=2, gate=1, eps=1e-6, tokens=tokens, heads=heads, hidden=dim,
        weight=zeros(rig, dim, size=4), x=x, x_stride=width, z=z, z_stride=width, y=y,
        y_stride=width,
    )  # fmt: skip
    return lambda: gdn.gated_rms_norm(rig.library, call)


def place(case: str) -> Callable[[], None]:
    """The timed call of a case."""
    from sm70_rig import CudartMemory, Rig  # noqa: PLC0415

    from appliance.nvfp4.library import Library  # noqa: PLC0415

    kind, _, text = case.partition(":")
    sizes = [int(each) for each in text.split("x")]
    rig = Rig(Library(Path(os.environ["BENCH_LIBRARY"])), CudartMemory())
    if kind == "conv":
        return place_conv(rig, sizes)
    if kind == "norm":
        return place_norm(rig, sizes)
    return place_delta(rig, kind, sizes)


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
    from sm70_gdn_cases import GDN_CASES  # noqa: PLC0415

    arguments = [str(CASES / "sm70_run.py"), str(options.library), *GDN_CASES]
    output = on_model(options, arguments, VSIM_FUNC="1")
    (line,) = (each for each in output.splitlines() if each.startswith("RESULTS "))
    wrong = {k: v for k, v in json.loads(line.removeprefix("RESULTS ")).items() if v != "ok"}
    if wrong:
        raise SystemExit(f"a kernel is wrong, nothing was timed: {wrong}")


def moved_bytes(kind: str, sizes: list[int]) -> int:
    """Bytes that a call has to move at least: states, or rows in and out."""
    if kind == "decode":
        return sizes[3] * sizes[1] * sizes[2] * sizes[2] * 4 * 2
    if kind == "conv":
        channels, sequences, length = sizes
        return channels * 2 * (sequences * length * 2 + sequences * 6 + 4)
    return sizes[0] * sizes[1] * sizes[2] * 2 * 3


def row_of(options: argparse.Namespace, case: str) -> dict[str, Any]:
    """Time a case, all of its kernels, the second of two calls (of a prefill the only one)."""
    kind, _, text = case.partition(":")
    sizes = [int(each) for each in text.split("x")]
    output = on_model(options, [__file__, "--place", case])
    times = [float(each) for each in re.findall(r"cycles=\d+\s+t=([\d.]+)us", output)]
    if kind not in ("prefill", "steps"):
        times = times[len(times) // 2 :]
    us = sum(times)
    row: dict[str, Any] = {"case": case, "us": round(us, 2)}
    if len(times) > 1:
        row["launches_us"] = [round(each, 2) for each in times]
    if kind in ("prefill", "steps"):
        row["us_per_token"] = round(us / sizes[3], 3)
    else:
        rate = moved_bytes(kind, sizes) / us / 1e3
        row |= {"gb_s": round(rate, 1), "of_ceiling": round(rate / COPY_CEILING_GB_S, 3)}
    return row


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path, nargs="?")
    parser.add_argument("--vsim", type=Path)
    parser.add_argument("--only", help="cases, comma-separated")
    parser.add_argument("--place", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Check, time, and print; or be the timed process."""
    options = parse()
    if options.place:
        call = place(options.place)
        call()
        if options.place.partition(":")[0] not in ("prefill", "steps"):
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
