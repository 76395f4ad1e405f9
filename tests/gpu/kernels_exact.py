"""Every nibble times every finite scale code, exact, through repack and each kernel.

A weight of 127 x 16 rows holds every scale code with every rotation of the 16 nibbles, so that each
column position meets each product. One-hot tokens then read single products out of a kernel; both
are exact in FP16, so the answer has to be equal, not close.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from kernels_compare import assert_same
from kernels_device import Device, Matrix, Packed
from kernels_matrix import kernel_of
from sm70_rig import E4M3

from appliance.nvfp4 import abi

if TYPE_CHECKING:
    from kernels_report import Report

ROWS = 127 * 16
SCALE_KINDS = (
    *((group, torch.uint8) for group in (16, 32, 64, 128)),
    *((group, dtype) for group in (64, 128) for dtype in (torch.float16, torch.float32)),
)


def every_product(
    device: Device, k: int, *, copies: int = 1, group: int = 16, dtype: torch.dtype = torch.uint8
) -> Matrix:
    """Row 16 s + j holds scale code s and, in column c, nibble (c + j) % 16."""
    rotation = torch.arange(16).repeat(127)[:, None]
    nibbles = (torch.arange(k)[None, :] + rotation) % 16
    codes = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).to(torch.uint8)
    scale_codes = torch.arange(127, dtype=torch.uint8).repeat_interleave(16)
    scales = scale_codes if dtype == torch.uint8 else torch.tensor(E4M3)[scale_codes.long()]
    scales = scales.to(dtype)[:, None].repeat(1, k // group)
    return Matrix(
        codes.repeat(copies, 1).to(device.name),
        scales.repeat(copies, 1).contiguous().to(device.name),
        torch.ones(ROWS * copies, device=device.name),
    )


def one_hot(device: Device, m: int, k: int, first: int) -> torch.Tensor:
    """FP16 [m, k]: token t is 1 in column (first + t) % k."""
    x = torch.zeros(m, k, dtype=torch.float16, device=device.name)
    rows = torch.arange(m, device=device.name)
    x[rows, (rows + first) % k] = 1
    return x


def run_repack(device: Device, report: Report, *, quick: bool) -> None:
    """Repack and dequantize, whole and in parts of awkward sizes."""
    for group, dtype in SCALE_KINDS:
        matrix = every_product(device, 384, group=group, dtype=dtype)
        right = matrix.unscaled()
        for rows_a_call in (0, 333) if quick else (0, 1, 31, 333):
            if rows_a_call == 1 and group != 16:
                continue
            where = f"group {group} {dtype} in parts of {rows_a_call or 'all'}"
            with report.case(where):
                packed = device.pack(matrix, rows_a_call=rows_a_call)
                assert_same(device.dequantize(packed), right, f"{where} to FP32")
                assert_same(device.dequantize(packed, dtype=torch.float16), right, "to FP16")
    report.details.update(products_per_column=ROWS, scale_kinds=len(SCALE_KINDS))


def run_dense(device: Device, report: Report, *, quick: bool) -> None:
    """Each dense kernel: narrow and wide tiles, split and whole K, each kind of scale."""
    kernels: dict[str, int] = {}
    # K of 2112 splits; four copies of the rows fill two column groups of the widest tile.
    plans = [(144, 1, (1, 8, 9, 16, 17, 32, 33, 64, 128, 300)), (2112, 1, (16, 32, 64))]
    if quick:
        plans = [(48, 1, (1, 8, 16, 32, 64))]
    else:
        plans += [(144, 4, (8, 16, 32, 64)), (144, 10, (8, 16, 32, 64))]
    for k, copies, ms in plans:
        matrix = every_product(device, k, copies=copies)
        _read_out(device, report, matrix, ms, kernels)
    for group, dtype in SCALE_KINDS[1:2] if quick else SCALE_KINDS[1:]:
        for copies in (1,) if quick else (1, 4):
            matrix = every_product(device, 256, copies=copies, group=group, dtype=dtype)
            _read_out(device, report, matrix, (8, 16, 32, 64), kernels)
    report.details["kernels"] = kernels


def _read_out(
    device: Device, report: Report, matrix: Matrix, ms: tuple[int, ...], kernels: dict[str, int]
) -> None:
    packed, right = device.pack(matrix), matrix.unscaled().T
    k = matrix.k
    for m in ms:
        where = f"M={m} N={matrix.n} K={k} group {matrix.group} {matrix.scales.dtype}"
        kernel = kernel_of(device, packed, m)
        kernels[kernel] = kernels.get(kernel, 0) + 1
        with report.case(where):
            for first in range(0, k, m):
                found = device.matmul(packed, one_hot(device, m, k, first))
                wanted = right[(torch.arange(m, device=device.name) + first) % k]
                assert_same(found, wanted, f"{where}, tokens from column {first}")


def run_grouped(device: Device, report: Report, *, quick: bool) -> None:
    """Each grouped kernel: row tiles of 8, 16, 32 and 64 pairs, shallow and deep K.

    A gate of 32 makes silu exact, so gate_up gives 32 times the product of the up half; the gate
    half is read out with a global that lifts it beyond 32, where silu is the identity or zero.
    """
    kernels: dict[str, int] = {}
    kinds = [(144, 16, torch.uint8), (1056, 16, torch.uint8)]
    kinds += [(256, group, dtype) for group, dtype in SCALE_KINDS[1:]]
    for k, group, dtype in [(64, 16, torch.uint8)] if quick else kinds:
        exact = every_product(device, k, group=group, dtype=dtype)
        experts = {
            "down": (device.pack(exact, exact), exact.unscaled()),
            "up": _gate_up(device, _constant(exact), exact, up_global=2.0**-5),
            "gate": _gate_up(device, _lifted(exact), _constant(exact), up_global=2.0**-20),
        }
        for m in (12, 24, 48, 64):
            for name, (packed, right) in experts.items():
                where = f"{name} M={m} K={k} group {group} {dtype}"
                kernel = kernel_of(device, packed, m)
                kernels[kernel] = kernels.get(kernel, 0) + 1
                with report.case(where):
                    _read_grouped(device, name, packed, right, m)
    report.details["kernels"] = kernels


def _constant(like: Matrix) -> Matrix:
    """Rows of 32 = 4.0 x 8.0."""
    scale = 0x50 if like.scales.dtype == torch.uint8 else 8.0
    return Matrix(
        torch.full_like(like.codes, 0x66), torch.full_like(like.scales, scale), like.row_globals
    )


def _lifted(exact: Matrix) -> Matrix:
    return Matrix(exact.codes, exact.scales, exact.row_globals * 2.0**15)


def _gate_up(
    device: Device, gate: Matrix, up: Matrix, *, up_global: float
) -> tuple[Packed, torch.Tensor]:
    """Two equal experts, and silu(gate) * up as FP64 [width, k] for one-hot tokens."""
    whole = Matrix(
        torch.cat([gate.codes, up.codes]),
        torch.cat([gate.scales, up.scales]),
        torch.cat([gate.row_globals, up.row_globals * up_global]),
    )
    values = whole.values()
    gates, ups = values[: gate.n], values[gate.n :]
    # Gates are 0, or at least 32 in size: silu keeps a positive one and loses a negative one.
    right = torch.where(gates > 0, gates, torch.zeros_like(gates)) * ups
    return device.pack(whole, whole, kind=abi.WeightKind.GATE_UP), right


def _read_grouped(device: Device, name: str, packed: Packed, right: torch.Tensor, m: int) -> None:
    k = right.shape[1]
    tokens = torch.arange(m, device=device.name)
    # Two thirds of the tokens go to the first expert, so that row tiles are of unequal length.
    ids = (tokens % 3 == 2).int()[:, None].contiguous()
    routing = device.route(ids, 2)
    ones = torch.ones(m, 1, device=device.name)
    for first in range(0, k, m):
        x = one_hot(device, m, k, first)
        if name == "down":
            found = device.down(packed, routing, ones, x)
        else:
            found = device.gate_up(packed, routing, x)
        wanted = right[:, (tokens + first) % k].T
        assert_same(found, wanted, f"{name} M={m}, tokens from column {first}")
