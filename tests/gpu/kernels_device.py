"""One kernel library over torch tensors: poisoned outputs, guarded edges, FP64 references.

The same code drives libnvfp4_sm70.so on `cuda` and libnvfp4_ref.so on `cpu`.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from kernels_compare import GUARD, SENTINEL, unguarded
from sm70_rig import E2M1, E4M3

from appliance.nvfp4 import abi

if TYPE_CHECKING:
    import numpy as np

    from appliance.nvfp4.library import Library

SCALE_TYPES = {
    torch.uint8: abi.Type.E4M3,
    torch.float16: abi.Type.F16,
    torch.float32: abi.Type.F32,
}
IO_TYPES = {torch.float16: abi.Type.F16, torch.float32: abi.Type.F32}


@dataclass(frozen=True)
class Matrix:
    """Canonical tensors: codes uint8 [N, K / 2], scales [N, K / group], globals float32 [N]."""

    codes: torch.Tensor
    scales: torch.Tensor
    row_globals: torch.Tensor
    is_divisor: bool = False

    @property
    def n(self) -> int:
        return self.codes.shape[0]

    @property
    def k(self) -> int:
        return self.codes.shape[1] * 2

    @property
    def group(self) -> int:
        return self.k // self.scales.shape[1]

    def unscaled(self) -> torch.Tensor:
        """FP64 [N, K]: code times block scale, exact."""
        e2m1 = torch.tensor(E2M1, dtype=torch.float64, device=self.codes.device)
        values = torch.empty(self.n, self.k, dtype=torch.float64, device=self.codes.device)
        values[:, 0::2] = e2m1[(self.codes & 15).long()]
        values[:, 1::2] = e2m1[(self.codes >> 4).long()]
        values.view(self.n, -1, self.group).mul_(self.scale_values()[..., None])
        return values

    def scale_values(self) -> torch.Tensor:
        """FP64 [N, K / group]."""
        if self.scales.dtype == torch.uint8:
            table = torch.tensor(E4M3, dtype=torch.float64, device=self.scales.device)
            return table[self.scales.long()]
        return self.scales.double()

    def values(self) -> torch.Tensor:
        """FP64 [N, K] with the globals, exact for multipliers but for FP64's own rounding."""
        rows = self.row_globals.double()[:, None]
        return self.unscaled().div_(rows) if self.is_divisor else self.unscaled().mul_(rows)


@dataclass(frozen=True)
class Packed:
    """A packed weight and the memory it lies in."""

    handle: abi.Weight
    buffer: torch.Tensor


@dataclass(frozen=True)
class Routing:
    """Who computes what: ids int32 [m, top_k], and the plan made from them."""

    ids: torch.Tensor
    plan: torch.Tensor
    experts: int

    @property
    def m(self) -> int:
        return self.ids.shape[0]

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]


class Device:
    """Calls of one library on tensors of one device."""

    def __init__(self, library: Library, name: str) -> None:
        self.library = library
        self.name = name

    @property
    def is_cuda(self) -> bool:
        return self.name == "cuda"

    def generator(self, *key: int) -> torch.Generator:
        """Random numbers that depend on the key only."""
        seed = 0
        for part in key:
            seed = (seed * 1_000_003 + part + 1) % (1 << 63)
        return torch.Generator(self.name).manual_seed(seed)

    def stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream) if self.is_cuda else 0

    def room(self, nbytes: int, fill: int = 0xFF) -> torch.Tensor:
        """Filled uint8 [nbytes] at an address that buffers, plans and workspaces need.

        0xFF makes NaN of FP16 and FP32, so that what nobody wrote shows in a result.
        """
        slack = 0 if self.is_cuda else abi.BUFFER_ALIGNMENT
        raw = torch.full((nbytes + slack,), fill, dtype=torch.uint8, device=self.name)
        start = -raw.data_ptr() % abi.BUFFER_ALIGNMENT if slack else 0
        return raw[start : start + nbytes]

    def put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.name)

    def matrix(
        self,
        n: int,
        k: int,
        *,
        seed: int = 0,
        group: int = 16,
        scale_dtype: torch.dtype = torch.uint8,
        is_divisor: bool = False,
    ) -> Matrix:
        """Random codes, scales over all finite codes, a global of its own for each row."""
        source = self.generator(n, k, group, seed)
        options = {"generator": source, "device": self.name}
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, **options)
        if scale_dtype == torch.uint8:
            scales = torch.randint(0, 127, (n, k // group), dtype=torch.uint8, **options)
        else:
            scales = torch.rand(n, k // group, **options).mul_(2).to(scale_dtype)
        spread = torch.rand(n, **options) * 5 - 12
        row_globals = torch.exp2(spread)
        return Matrix(codes, scales, 1 / row_globals if is_divisor else row_globals, is_divisor)

    def tokens(self, m: int, k: int, *, seed: int = 0, pad: int = 0) -> torch.Tensor:
        """FP16 [m, k] normal values; rows lie k + pad elements apart."""
        source = self.generator(m, k, seed, 77)
        whole = torch.randn(m, k + pad, generator=source, device=self.name).half()
        return whole[:, :k]

    # ---- weights

    def pack(
        self, *experts: Matrix, kind: abi.WeightKind = abi.WeightKind.LINEAR, rows_a_call: int = 0
    ) -> Packed:
        """Pack one matrix, or one an expert; raise what the report says."""
        first = experts[0]
        source = describe(first)
        desc = abi.WeightDesc(
            kind=kind,
            experts=len(experts),
            n=first.n,
            k=first.k,
            group=source.group,
            scale_type=source.scale_type,
            global_kind=source.global_kind,
        )
        buffer = self.room(self.library.weight_bytes(desc), 0xA5)
        handle = self.library.weight_create(
            desc, buffer.data_ptr(), buffer.numel(), stream=self.stream()
        )
        packed = Packed(handle, buffer)
        report = self.room(ctypes.sizeof(abi.Report))
        self.library.report_reset(report.data_ptr(), stream=self.stream())
        step = rows_a_call or first.n
        for index, matrix in enumerate(experts):
            for begin in range(0, matrix.n, step):
                part = slice_rows(matrix, begin, begin + step)
                self.repack(packed, part, report, expert=index, row_begin=begin)
        found = abi.Report.from_buffer_copy(bytes(report.cpu().numpy().tobytes()))
        self.library.report_status(found, handle)
        return packed

    def repack(
        self, packed: Packed, part: Matrix, report: torch.Tensor, *, expert: int, row_begin: int
    ) -> None:
        self.library.repack(
            packed.handle,
            describe(part),
            expert=expert,
            row_begin=row_begin,
            report=report.data_ptr(),
            stream=self.stream(),
        )

    def dequantize(
        self,
        packed: Packed,
        *,
        dtype: torch.dtype = torch.float32,
        flags: abi.Dequantize = abi.Dequantize.NONE,
        expert: int = 0,
        row_begin: int = 0,
        rows: int | None = None,
    ) -> torch.Tensor:
        count = packed.handle.n - row_begin if rows is None else rows
        k = packed.handle.k
        out = torch.full((count + 1, k), math.nan, dtype=dtype, device=self.name)
        out[count] = SENTINEL
        self.library.dequantize(
            packed.handle,
            out.data_ptr(),
            out_type=IO_TYPES[dtype],
            out_stride=k,
            expert=expert,
            row_begin=row_begin,
            rows=count,
            flags=flags,
            stream=self.stream(),
        )
        assert bool((out[count] == SENTINEL).all()), "dequantize wrote past its last row"
        return out[:count]

    # ---- products

    def workspace(self, packed: Packed, m: int) -> torch.Tensor:
        return self.room(self.library.matmul_workspace_bytes(packed.handle, m))

    def guarded(self, rows: int, columns: int) -> torch.Tensor:
        """FP16 [rows + 1, columns + GUARD]: NaN inside, SENTINEL around."""
        whole = torch.full(
            (rows + 1, columns + GUARD), SENTINEL, dtype=torch.float16, device=self.name
        )
        whole[:rows, :columns] = math.nan
        return whole

    def matmul_into(
        self,
        packed: Packed,
        x: torch.Tensor,
        y: torch.Tensor,
        workspace: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """One hot call; y is [m, n] of any row stride."""
        self.library.matmul(
            packed.handle,
            x.shape[0],
            io_type=abi.Type.F16,
            x=x.data_ptr(),
            x_stride=x.stride(0),
            y=y.data_ptr(),
            y_stride=y.stride(0),
            bias=0 if bias is None else bias.data_ptr(),
            workspace=workspace.data_ptr() if workspace.numel() else 0,
            workspace_bytes=workspace.numel(),
            stream=self.stream(),
        )

    def matmul(
        self, packed: Packed, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """FP16 [m, n] from poisoned memory; nothing around it may change."""
        m, n = x.shape[0], packed.handle.n
        whole = self.guarded(m, n)
        self.matmul_into(packed, x, whole[:m, :n], self.workspace(packed, m), bias)
        return unguarded(whole, m, n)

    # ---- mixture of experts

    def route(
        self, ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None = None
    ) -> Routing:
        m, top_k = ids.shape
        plan = self.room(self.library.moe_plan_bytes(m, top_k, experts), 0xEE)
        routing = Routing(ids, plan, experts)
        self.plan_into(routing, expert_map)
        return routing

    def plan_into(self, routing: Routing, expert_map: torch.Tensor | None = None) -> None:
        self.library.moe_plan(
            routing.ids.data_ptr(),
            routing.m,
            top_k=routing.top_k,
            experts=routing.experts,
            plan=routing.plan.data_ptr(),
            plan_bytes=routing.plan.numel(),
            expert_map=0 if expert_map is None else expert_map.data_ptr(),
            map_size=0 if expert_map is None else expert_map.numel(),
            stream=self.stream(),
        )

    def gate_up_into(
        self,
        packed: Packed,
        routing: Routing,
        x: torch.Tensor,
        y: torch.Tensor,
        workspace: torch.Tensor,
    ) -> None:
        self.library.moe_gate_up(
            packed.handle,
            routing.m,
            **_grouped(routing, x, y, workspace),
            stream=self.stream(),
        )

    def gate_up(self, packed: Packed, routing: Routing, x: torch.Tensor) -> torch.Tensor:
        """FP16 [m * top_k, n / 2]."""
        rows, width = routing.ids.numel(), packed.handle.n // 2
        whole = self.guarded(rows, width)
        needed = self.library.moe_workspace_bytes(packed.handle, None, routing.m, routing.top_k)
        self.gate_up_into(packed, routing, x, whole[:rows, :width], self.room(needed))
        return unguarded(whole, rows, width)

    def down_into(
        self,
        packed: Packed,
        routing: Routing,
        x: torch.Tensor,
        y: torch.Tensor,
        workspace: torch.Tensor,
        *,
        weights: torch.Tensor,
    ) -> None:
        self.library.moe_down(
            packed.handle,
            routing.m,
            **_grouped(routing, x, y, workspace),
            topk_weights=weights.data_ptr(),
            stream=self.stream(),
        )

    def down(
        self, packed: Packed, routing: Routing, weights: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """FP16 [m, n]."""
        m, n = routing.m, packed.handle.n
        whole = self.guarded(m, n)
        needed = self.library.moe_workspace_bytes(None, packed.handle, m, routing.top_k)
        self.down_into(packed, routing, x, whole[:m, :n], self.room(needed), weights=weights)
        return unguarded(whole, m, n)


def _grouped(
    routing: Routing, x: torch.Tensor, y: torch.Tensor, workspace: torch.Tensor
) -> dict[str, int]:
    return {
        "top_k": routing.top_k,
        "plan": routing.plan.data_ptr(),
        "plan_bytes": routing.plan.numel(),
        "io_type": abi.Type.F16,
        "x": x.data_ptr(),
        "x_stride": x.stride(0),
        "y": y.data_ptr(),
        "y_stride": y.stride(0),
        "workspace": workspace.data_ptr() if workspace.numel() else 0,
        "workspace_bytes": workspace.numel(),
    }


def describe(matrix: Matrix) -> abi.Source:
    """The ABI's description; the tensors must outlive it."""
    return abi.Source(
        group=matrix.group,
        scale_type=SCALE_TYPES[matrix.scales.dtype],
        global_kind=abi.GlobalKind.DIVISOR if matrix.is_divisor else abi.GlobalKind.MULTIPLIER,
        n=matrix.n,
        k=matrix.k,
        codes=matrix.codes.data_ptr(),
        codes_stride=matrix.codes.shape[1],
        scales=matrix.scales.data_ptr(),
        scales_stride=matrix.scales.shape[1],
        globals=matrix.row_globals.data_ptr(),
    )


def slice_rows(matrix: Matrix, begin: int, end: int) -> Matrix:
    return Matrix(
        matrix.codes[begin:end],
        matrix.scales[begin:end],
        matrix.row_globals[begin:end],
        matrix.is_divisor,
    )
