"""Times of the kernels that read memory and use no tensor core, as information.

The products multiply with mma.m8n8k4, which only Volta has in hardware: any newer GPU emulates it
many times slower. Their times here say nothing about a V100, so only a few are taken and marked.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from kernels_contract import HotCall
from kernels_device import Device, describe

from appliance.nvfp4 import abi

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels_report import Report

N, K = 17408, 5120
ROUNDS = 20


def seconds_of(run: Callable[[], None]) -> float:
    """Median of the rounds by events, after a warm-up."""
    for _ in range(3):
        run()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[ROUNDS // 2]


def run_speed(device: Device, report: Report, *, quick: bool) -> None:
    """GB/s counting what is read and written, beside a plain copy of the same run."""
    rows = []
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device.name)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / seconds_of(lambda: target.copy_(source))
    rows.append({"kernel": "copy of 1 GiB by torch", "GB/s": round(copy / 1e9)})
    for name, nbytes, run in _memory_bound(device):
        with report.case(name):
            rate = nbytes / seconds_of(run)
            share = f"{rate / copy:.0%}"
            rows.append({"kernel": name, "GB/s": round(rate / 1e9), "share of copy": share})
    report.details.update(rows=rows, emulated=_emulated(device), quick=quick, rounds=ROUNDS)


def _memory_bound(device: Device) -> list[tuple[str, int, Callable[[], None]]]:
    matrix = device.matrix(N, K)
    packed = device.pack(matrix)
    weight_bytes = N * K // 2 + N * K // 16
    half = torch.empty(N, K, dtype=torch.float16, device=device.name)
    report = device.room(64)
    device.library.report_reset(report.data_ptr(), stream=device.stream())
    found: list[tuple[str, int, Callable[[], None]]] = [
        (
            f"dequantize {N}x{K} to FP16",
            weight_bytes + 2 * N * K,
            lambda: device.library.dequantize(
                packed.handle,
                half.data_ptr(),
                out_type=abi.Type.F16,
                out_stride=K,
                stream=device.stream(),
            ),
        ),
        (
            f"repack {N}x{K}",
            2 * weight_bytes,
            lambda: device.library.repack(
                packed.handle,
                describe(matrix),
                report=report.data_ptr(),
                stream=device.stream(),
            ),
        ),
    ]
    tokens = 4096
    x = device.tokens(tokens, 2 * K)
    y = torch.empty(tokens, K, dtype=torch.float16, device=device.name)
    gain = torch.ones(K, device=device.name)
    norm = abi.Norm(io_type=1, weight_type=2, eps=1e-6, rows=tokens, hidden=K)
    norm.weight, norm.x, norm.y = gain.data_ptr(), x.data_ptr(), y.data_ptr()  # type: ignore[attr-defined]
    norm.x_stride, norm.y_stride = 2 * K, K  # type: ignore[attr-defined]
    found += [
        (
            f"rms_norm {tokens}x{K}",
            4 * tokens * K,
            lambda: device.library.rms_norm(norm, stream=device.stream()),
        ),
        (
            f"silu_mul {tokens}x{K}",
            6 * tokens * K,
            lambda: device.library.silu_mul(
                tokens,
                K,
                io_type=abi.Type.F16,
                x=x.data_ptr(),
                x_stride=2 * K,
                y=y.data_ptr(),
                y_stride=K,
                stream=device.stream(),
            ),
        ),
    ]
    return found


def _emulated(device: Device) -> list[dict[str, Any]]:
    """Products: emulated, so that a reader can see how far from the weights' bandwidth they are."""
    packed = device.pack(device.matrix(5120, 5120))
    rows = []
    for m in (1, 8, 16, 32, 256):
        x, workspace = device.tokens(m, 5120), device.workspace(packed, m)
        y = torch.full((m, 5120), math.nan, dtype=torch.float16, device=device.name)
        call = HotCall(
            f"matmul 5120x5120 M={m}",
            lambda x=x, y=y, workspace=workspace: device.matmul_into(packed, x, y, workspace),
            [x],
            [y],
            [workspace],
        )
        seconds = seconds_of(call.run)
        rows.append({"kernel": call.name, "us": round(seconds * 1e6, 1), "emulated": True})
    return rows
