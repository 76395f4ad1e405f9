"""The sm_70 library on numpy arrays, over any memory a CUDA run time of this process gives out."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from appliance.nvfp4 import abi, host

if TYPE_CHECKING:
    from appliance.nvfp4.library import Library

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3_values() -> np.ndarray:
    """The 127 legal codes, from the definition: bias 7, subnormals in steps of 2^-9."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    normal = np.exp2(exponent - 7.0) * (1 + mantissa / 8)
    return np.where(exponent == 0, mantissa * 2.0**-9, normal)


E4M3 = e4m3_values()


class Memory(Protocol):
    """Device memory: addresses in, arrays out."""

    def allocate(self, nbytes: int) -> int: ...
    def release(self, address: int) -> None: ...
    def write(self, address: int, array: np.ndarray) -> None: ...
    def read(self, address: int, nbytes: int) -> bytes: ...


class CudartMemory:
    """The shared CUDA run time that is already in this process, whoever executes behind it."""

    def __init__(self, name: str = "libcudart.so.11.0") -> None:
        self._runtime = ctypes.CDLL(name)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._runtime, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} gave {status}")

    def allocate(self, nbytes: int) -> int:
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(max(nbytes, 1)))
        return int(pointer.value or 0)

    def release(self, address: int) -> None:
        self._call("cudaFree", ctypes.c_void_p(address))

    def write(self, address: int, array: np.ndarray) -> None:
        source = ctypes.c_void_p(array.ctypes.data)
        size = ctypes.c_size_t(array.nbytes)
        self._call("cudaMemcpy", ctypes.c_void_p(address), source, size, 1)

    def read(self, address: int, nbytes: int) -> bytes:
        target = ctypes.create_string_buffer(nbytes)
        source = ctypes.c_void_p(address)
        self._call("cudaMemcpy", target, source, ctypes.c_size_t(nbytes), 2)
        return target.raw


@dataclass(frozen=True)
class Matrix:
    """A canonical matrix: codes uint8 [N, K / 2], scales [N, K / group], globals float32 [N]."""

    codes: np.ndarray
    scales: np.ndarray
    row_globals: np.ndarray
    is_divisor: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    def unscaled(self) -> np.ndarray:
        """FP64 [N, K]: code times block scale, exact."""
        n, k = self.shape
        values = np.empty((n, k))
        values[:, 0::2] = E2M1[self.codes & 15]
        values[:, 1::2] = E2M1[self.codes >> 4]
        is_e4m3 = self.scales.dtype == np.uint8
        scales = E4M3[self.scales] if is_e4m3 else self.scales.astype(np.float64)
        return values * np.repeat(scales, k // self.scales.shape[1], axis=1)

    def values(self) -> np.ndarray:
        """FP64 [N, K] with the globals."""
        rows = self.row_globals.astype(np.float64)[:, None]
        return self.unscaled() / rows if self.is_divisor else self.unscaled() * rows


def random_matrix(
    rng: np.random.Generator,
    n: int,
    k: int,
    *,
    group: int = 16,
    scale_dtype: type = np.uint8,
    is_divisor: bool = False,
) -> Matrix:
    """Random codes; scales over a range of 2^8, as real checkpoints; a global of its own a row."""
    codes = rng.integers(0, 256, (n, k // 2), np.uint8)
    if scale_dtype is np.uint8:
        scales = rng.integers(0x20, 0x60, (n, k // group), np.uint8)
    else:
        scales = rng.uniform(0.1, 2, (n, k // group)).astype(scale_dtype)
    row_globals = np.exp2(rng.uniform(-10, -6, n)).astype(np.float32)
    return Matrix(codes, scales, 1 / row_globals if is_divisor else row_globals, is_divisor)


@dataclass(frozen=True)
class Packed:
    """A packed weight in device memory."""

    handle: abi.Weight
    address: int


class Rig:
    """Calls of one library on numpy arrays; every array goes to the device and back."""

    def __init__(self, library: Library, memory: Memory) -> None:
        self.library = library
        self.memory = memory
        self._held: list[int] = []

    def put(self, array: np.ndarray) -> int:
        contiguous = np.ascontiguousarray(array)
        address = self.room(contiguous.nbytes)
        self.memory.write(address, contiguous)
        return address

    def room(self, nbytes: int) -> int:
        address = self.memory.allocate(nbytes)
        self._held.append(address)
        return address

    def release(self) -> None:
        """Give back what this rig allocated."""
        while self._held:
            self.memory.release(self._held.pop())

    def get(self, address: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(self.memory.read(address, nbytes), dtype).reshape(shape)

    def pack(self, *experts: Matrix, kind: abi.WeightKind = abi.WeightKind.LINEAR) -> Packed:
        """Pack one matrix, or one an expert; raise what the report says."""
        first = experts[0]
        described = host.describe(
            first.codes, first.scales, first.row_globals, is_divisor=first.is_divisor
        )
        desc = abi.WeightDesc(
            kind=kind,
            experts=len(experts),
            n=described.n,
            k=described.k,
            group=described.group,
            scale_type=described.scale_type,
            global_kind=described.global_kind,
        )
        nbytes = self.library.weight_bytes(desc)
        buffer = self.room(nbytes)
        weight = Packed(self.library.weight_create(desc, buffer, nbytes), buffer)
        report = self.room(ctypes.sizeof(abi.Report))
        self.library.report_reset(report)
        for index, matrix in enumerate(experts):
            self.repack(weight, matrix, report=report, expert=index)
        self.raise_report(weight, report)
        return weight

    def raise_report(self, weight: Packed, report: int) -> None:
        raw = self.memory.read(report, ctypes.sizeof(abi.Report))
        self.library.report_status(abi.Report.from_buffer_copy(raw), weight.handle)

    def repack(
        self, weight: Packed, matrix: Matrix, *, report: int, expert: int = 0, row_begin: int = 0
    ) -> None:
        source = host.describe(
            matrix.codes, matrix.scales, matrix.row_globals, is_divisor=matrix.is_divisor
        )
        source.codes = self.put(matrix.codes)
        source.scales = self.put(matrix.scales)
        source.globals = self.put(matrix.row_globals)
        self.library.repack(
            weight.handle, source, expert=expert, row_begin=row_begin, report=report
        )

    def dequantize(
        self,
        weight: Packed,
        *,
        dtype: type = np.float32,
        flags: abi.Dequantize = abi.Dequantize.NONE,
        expert: int = 0,
        row_begin: int = 0,
        rows: int | None = None,
    ) -> np.ndarray:
        count = weight.handle.n - row_begin if rows is None else rows
        out = self.put(np.full((count, weight.handle.k), np.nan, dtype))
        self.library.dequantize(
            weight.handle,
            out,
            out_type=abi.Type.F16 if dtype is np.float16 else abi.Type.F32,
            out_stride=weight.handle.k,
            expert=expert,
            row_begin=row_begin,
            rows=count,
            flags=flags,
        )
        return self.get(out, (count, weight.handle.k), dtype)

    def matmul(
        self, weight: Packed, x: np.ndarray, *, bias: np.ndarray | None = None
    ) -> np.ndarray:
        """FP16 [M, N] of FP16 x [M, K]; memory around y must stay as it was."""
        m, n = x.shape[0], weight.handle.n
        guard = 8
        y = self.put(np.full((m, n + guard), 7.25, np.float16))
        needed = self.library.matmul_workspace_bytes(weight.handle, m)
        self.library.matmul(
            weight.handle,
            m,
            io_type=abi.Type.F16,
            x=self.put(x),
            x_stride=x.shape[1],
            y=y,
            y_stride=n + guard,
            bias=0 if bias is None else self.put(bias),
            workspace=self.put(np.full(needed, 0xFF, np.uint8)) if needed else 0,
            workspace_bytes=needed,
        )
        found = self.get(y, (m, n + guard), np.float16)
        assert (found[:, n:] == 7.25).all(), "wrote past the last column"
        return found[:, :n]

    def plan(self, ids: np.ndarray, experts: int, expert_map: np.ndarray | None = None) -> int:
        m, top_k = ids.shape
        nbytes = self.library.moe_plan_bytes(m, top_k, experts)
        # A tile that nobody wrote would have 2^24 rows.
        plan = self.put(np.full(nbytes, 0x01, np.uint8))
        self.library.moe_plan(
            self.put(ids),
            m,
            top_k=top_k,
            experts=experts,
            plan=plan,
            plan_bytes=nbytes,
            expert_map=0 if expert_map is None else self.put(expert_map),
            map_size=0 if expert_map is None else expert_map.size,
        )
        return plan

    def gate_up(self, weight: Packed, plan: int, ids: np.ndarray, x: np.ndarray) -> np.ndarray:
        m, top_k = ids.shape
        width = weight.handle.n // 2
        y = self.put(np.full((m * top_k, width), np.nan, np.float16))
        self.library.moe_gate_up(
            weight.handle,
            m,
            top_k=top_k,
            plan=plan,
            plan_bytes=self.library.moe_plan_bytes(m, top_k, weight.handle.experts),
            io_type=abi.Type.F16,
            x=self.put(x),
            x_stride=x.shape[1],
            y=y,
            y_stride=width,
            workspace=0,
            workspace_bytes=0,
        )
        return self.get(y, (m * top_k, width), np.float16)

    def down(
        self, weight: Packed, plan: int, routing: tuple[np.ndarray, np.ndarray], x: np.ndarray
    ) -> np.ndarray:
        ids, weights = routing
        m, top_k = ids.shape
        y = self.put(np.full((m, weight.handle.n), np.nan, np.float16))
        needed = self.library.moe_workspace_bytes(None, weight.handle, m, top_k)
        self.library.moe_down(
            weight.handle,
            m,
            top_k=top_k,
            plan=plan,
            plan_bytes=self.library.moe_plan_bytes(m, top_k, weight.handle.experts),
            io_type=abi.Type.F16,
            x=self.put(x),
            x_stride=x.shape[1],
            topk_weights=self.put(weights),
            y=y,
            y_stride=weight.handle.n,
            workspace=self.room(needed),
            workspace_bytes=needed,
        )
        return self.get(y, (m, weight.handle.n), np.float16)
