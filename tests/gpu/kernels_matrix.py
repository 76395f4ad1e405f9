"""Dense products against FP64: every batch size on every awkward shape, and what surrounds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from kernels_compare import TOLERANCE, Error, assert_close, assert_same, error_of, typical_of
from kernels_device import Device, Matrix, Packed

from appliance.nvfp4 import abi

if TYPE_CHECKING:
    from kernels_report import Report

EVERY_M = (*range(1, 65), 100, 128, 257, 1024)
EVERY_N = (1, 7, 31, 33, 4120, 8240)
EVERY_K = (16, 48, 576, 1536, 5120, 17408)
# Of real models and their halves under tensor parallelism.
MODEL_SHAPES = (
    *((5120, 5120), (17408, 5120), (5120, 8704), (34816, 5120), (1024, 4096), (6144, 2048)),
    *((14336, 4096), (2880, 2880), (151936, 1024)),
)
QUICK_M = (1, 7, 8, 9, 16, 17, 32, 33, 64)
QUICK_SHAPES = ((1, 16), (7, 48), (31, 576), (33, 48), (33, 5120), (4120, 48), (8240, 48))


@dataclass
class Tally:
    """Cases done, and the worst of them."""

    cases: int = 0
    worst_norm: float = 0.0
    worst_element: float = 0.0
    worst_at: str = ""
    kernels: dict[str, int] = field(default_factory=dict)

    def add(self, error: Error, where: str, kernel: str) -> None:
        self.cases += 1
        self.worst_norm = max(self.worst_norm, error.norm)
        if error.element > self.worst_element:
            self.worst_element, self.worst_at = error.element, f"{where} at {list(error.at)}"
        self.kernels[kernel] = self.kernels.get(kernel, 0) + 1


def kernel_of(device: Device, packed: Packed, m: int, top_k: int = 1) -> str:
    """The chooser's words for a product: kernel, tile and whether K is split."""
    handle = packed.handle
    choice = device.library.choose(
        abi.Problem(
            kind=handle.kind,
            m=m,
            n=handle.n,
            k=handle.k,
            experts=handle.experts,
            top_k=top_k,
            group=handle.group,
            scale_type=handle.scale_type,
        )
    )
    name = device.library.kernel_name(choice.kernel)
    tile = f"{choice.tile_m}x{choice.tile_n}x{choice.tile_k}w{choice.warps}"
    return f"{name} {tile}{' split' if choice.split_k > 1 else ''}"


def run_matrix(device: Device, report: Report, *, quick: bool) -> None:
    """Every M on every (N, K), small shapes first; then shapes of real models."""
    ms = QUICK_M if quick else EVERY_M
    cross = QUICK_SHAPES if quick else [(n, k) for n in EVERY_N for k in EVERY_K]
    plan = [(shape, ms) for shape in sorted(cross, key=lambda shape: shape[0] * shape[1])]
    if not quick:
        plan += [(shape, EVERY_M) for shape in MODEL_SHAPES]
    tally, left = Tally(), []
    for index, ((n, k), batch) in enumerate(plan):
        if report.is_late():
            left.append([n, k])
            continue
        _run_shape(device, report, tally, (n, k, index), batch)
    if left:
        report.fail(f"the time was up before {len(left)} shapes, first {left[0]}")
    report.details.update(
        shapes=len(plan) - len(left),
        not_run=left,
        batch_sizes=list(ms),
        tolerance=TOLERANCE,
        **vars(tally),
    )


def _run_shape(
    device: Device, report: Report, tally: Tally, shape: tuple[int, int, int], ms: tuple[int, ...]
) -> None:
    """One weight and one FP64 product; every M is a window of its rows."""
    n, k, index = shape
    matrix = device.matrix(n, k, is_divisor=index % 2 == 1)
    packed = device.pack(matrix)
    values = matrix.values()
    pad = 8 * (index % 3)
    most = max(ms)
    x = device.tokens(most + 3, k, pad=pad)
    bias = torch.randn(n, generator=device.generator(n, k), device=device.name).half()
    right, typical = x.double() @ values.T, typical_of(x, values)
    for m in ms:
        begin, has_bias = m % 4 if m < most else 0, m % 2 == 0
        rows = slice(begin, begin + m)
        where = f"M={m} N={n} K={k}"
        with report.case(where):
            found = device.matmul(packed, x[rows], bias if has_bias else None)
            wanted = right[rows] + bias.double() if has_bias else right[rows]
            error = assert_close(found, wanted, typical[rows], where)
            tally.add(error, where, kernel_of(device, packed, m))


def run_overflow(device: Device, report: Report, *, quick: bool) -> None:
    """Sums far beyond FP16 before a small global, at every kernel; and beyond it after."""
    for n, k in ((40, 512),) if quick else ((40, 512), (40, 17408), (8240, 1536)):
        top = Matrix(
            torch.full((n, k // 2), 0x77, dtype=torch.uint8, device=device.name),
            torch.full((n, k // 16), 0x7E, dtype=torch.uint8, device=device.name),
            torch.full((n,), 2.0**-18, device=device.name),
        )
        packed = device.pack(top)
        for m in (1, 3, 14, 26, 70, 300):
            x = torch.full((m, k), 128.0, dtype=torch.float16, device=device.name)
            right = torch.full((m, n), 128.0 * k * 2688 * 2.0**-18, dtype=torch.float64)
            with report.case(f"sums of {128.0 * k * 2688:.1e}, M={m} N={n} K={k}"):
                found = device.matmul(packed, x)
                right = right.to(device.name)
                assert_close(found, right, right, "sums before the global")
        report.details[f"largest sum K={k}"] = 128.0 * k * 2688


def run_groups(device: Device, report: Report, *, quick: bool) -> None:
    """Groups of 16, 32, 64 and 128 with their scale types, multipliers and divisors."""
    kinds = [(group, torch.uint8) for group in (16, 32, 64, 128)]
    kinds += [(group, dtype) for group in (64, 128) for dtype in (torch.float16, torch.float32)]
    shapes = ((45, 384),) if quick else ((45, 384), (33, 5120), (4120, 1536), (8240, 1408))
    worst = Error(0.0, 0.0, ())
    for group, dtype in kinds:
        for index, (n, k) in enumerate(shapes):
            matrix = device.matrix(
                n, k, group=group, scale_dtype=dtype, is_divisor=index % 2 == 0, seed=5
            )
            packed, values = device.pack(matrix), matrix.values()
            for m in (2, 11, 30, 50) if quick else (1, 2, 8, 11, 16, 24, 32, 40, 64, 200):
                x = device.tokens(m, k)
                where = f"group {group} {dtype} M={m} N={n} K={k}"
                with report.case(where):
                    found = device.matmul(packed, x)
                    right = x.double() @ values.T
                    error = assert_close(found, right, typical_of(x, values), where)
                    worst = max(worst, error, key=lambda each: each.worst)
    report.details.update(worst_norm=worst.norm, worst_element=worst.element)


def run_slices(device: Device, report: Report, *, quick: bool) -> None:
    """Dequantized slices are right to the bit, and a GEMM of the caller's on them is right."""
    shapes = ((4120, 48),) if quick else ((4120, 1536), (8240, 576), (1, 16), (17408, 5120))
    for n, k in shapes:
        matrix = device.matrix(n, k, seed=3)
        packed = device.pack(matrix, rows_a_call=1000)
        values = matrix.values()
        half = values.float().half()
        with report.case(f"dequantize {n}x{k}"):
            assert_same(device.dequantize(packed), values.float(), "to FP32")
            assert_same(device.dequantize(packed, dtype=torch.float16), half, "to FP16")
            unscaled = abi.Dequantize.UNSCALED
            assert_same(
                device.dequantize(packed, dtype=torch.float16, flags=unscaled),
                matrix.unscaled(),
                "to FP16 without globals",
            )
        begin, rows = n // 3, max(1, n // 2)
        with report.case(f"rows {begin} to {begin + rows} of {n}x{k}"):
            found = device.dequantize(packed, dtype=torch.float16, row_begin=begin, rows=rows)
            assert_same(found, half[begin : begin + rows], "slice")
        m = 8 if quick else 1024
        x = device.tokens(m, k)
        with report.case(f"GEMM on dequantized rows, M={m} N={n} K={k}"):
            dense = device.dequantize(packed, dtype=torch.float16)
            found = (x.float() @ dense.float().T).half()
            error = error_of(found, x.double() @ values.T, typical_of(x, values))
            assert error.norm <= TOLERANCE, f"norm {error.norm:.2e}"


def run_foreign_rows(device: Device, report: Report, *, quick: bool) -> None:
    """A NaN in one token stays in its row, at any M."""
    matrix = device.matrix(96, 128)
    packed, values = device.pack(matrix), matrix.values()
    for m in (5, 15, 25, 60) if quick else (2, 5, 8, 15, 16, 25, 32, 60, 65, 129):
        for bad in {0, m // 2, m - 1}:
            x = device.tokens(m, 128)
            x[bad, 3] = torch.nan
            with report.case(f"NaN in row {bad} of {m}"):
                found = device.matmul(packed, x)
                assert bool(found[bad].isnan().all()), "the NaN does not show"
                kept = [row for row in range(m) if row != bad]
                right = x[kept].double() @ values.T
                assert_close(found[kept], right, typical_of(x[kept], values), "other rows")
