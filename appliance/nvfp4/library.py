"""Binds the two kernel libraries by ctypes: addresses in, exceptions out, no torch.

Every method is one call of kernels/include/nvfp4.h, which says what the arguments mean; addresses
are integers as `ndarray.ctypes.data` and `Tensor.data_ptr()` give them, 0 is a null pointer or
stream.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Final

import appliance
from appliance.nvfp4 import abi
from appliance.nvfp4.error import LibraryError, refused
from appliance.nvfp4.loading import load

__all__ = ["LIBRARY_DIR", "Library", "LibraryError", "reference_library", "sm70_library"]

LIBRARY_DIR: Final = Path(appliance.__file__).parent / "lib"


class Library:
    """One loaded kernel library.

    Attributes:
        path: The file it came from.
    """

    def __init__(self, path: Path) -> None:
        """Load a library and check its ABI.

        Raises:
            LibraryError: NVFP4_LIBRARY_MISSING, NVFP4_LIBRARY_UNLOADABLE or NVFP4_ABI (exit 40).
        """
        self.path = path
        self._dll = load(path)

    def build_info(self) -> str:
        """Return name, version, compiler and targets of the build in one line."""
        return bytes(self._dll.nvfp4_build_info()).decode()

    def kernel_name(self, kernel: int) -> str:
        """Return the chooser's word for a kernel, `unknown` for any other number."""
        return bytes(self._dll.nvfp4_kernel_name(kernel)).decode()

    # ---- weights

    def weight_bytes(self, desc: abi.WeightDesc) -> int:
        """Return the bytes of the buffer that a weight needs."""
        return self.query("nvfp4_weight_bytes", ctypes.byref(desc))

    def weight_create(
        self, desc: abi.WeightDesc, buffer: int, buffer_bytes: int, *, stream: int = 0
    ) -> abi.Weight:
        """Lay out a weight in a buffer and return its handle."""
        weight = abi.Weight()
        self.call(
            *("nvfp4_weight_create", ctypes.byref(desc), buffer, buffer_bytes),
            *(ctypes.byref(weight), stream),
        )
        return weight

    def weight_check(self, weight: abi.Weight) -> None:
        """Refuse a handle that is not whole or not of this library."""
        self.call("nvfp4_weight_check", ctypes.byref(weight))

    def report_reset(self, report: int, *, stream: int = 0) -> None:
        """Make a report in device memory ready for repacks."""
        self.call("nvfp4_report_reset", report, stream)

    def repack(
        self,
        weight: abi.Weight,
        source: abi.Source,
        *,
        expert: int = 0,
        row_begin: int = 0,
        report: int,
        stream: int = 0,
    ) -> None:
        """Repack rows of canonical tensors into a weight; faults of the data go into the report."""
        self.call(
            *("nvfp4_repack", ctypes.byref(weight), ctypes.byref(source)),
            *(expert, row_begin, report, stream),
        )

    def report_status(self, report: abi.Report, weight: abi.Weight) -> None:
        """Raise the first fault that repacks found; `report` is a copy in host memory."""
        self.call("nvfp4_report_status", ctypes.byref(report), ctypes.byref(weight))

    def dequantize(
        self,
        weight: abi.Weight,
        out: int,
        *,
        out_type: abi.Type,
        out_stride: int,
        expert: int = 0,
        row_begin: int = 0,
        rows: int | None = None,
        flags: abi.Dequantize = abi.Dequantize.NONE,
        stream: int = 0,
    ) -> None:
        """Write rows of a weight as [rows, k]; all rows from `row_begin` if `rows` is None."""
        count = weight.n - row_begin if rows is None else rows
        self.call(
            *("nvfp4_dequantize", ctypes.byref(weight), expert, row_begin, count),
            *(flags, out_type, out, out_stride, stream),
        )

    # ---- products

    def matmul_workspace_bytes(self, weight: abi.Weight, m_max: int) -> int:
        """Return the bytes of workspace that suffice for every m up to `m_max`."""
        return self.query("nvfp4_matmul_workspace_bytes", ctypes.byref(weight), m_max)

    def matmul(
        self,
        weight: abi.Weight,
        m: int,
        *,
        io_type: abi.Type,
        x: int,
        x_stride: int,
        y: int,
        y_stride: int,
        bias: int = 0,
        workspace: int = 0,
        workspace_bytes: int = 0,
        stream: int = 0,
    ) -> None:
        """Compute y[m, n] = x[m, k] * w^T + bias."""
        self.call(
            *("nvfp4_matmul", ctypes.byref(weight), io_type, m, x, x_stride, y, y_stride),
            *(bias, workspace, workspace_bytes, stream),
        )

    def choose(self, problem: abi.Problem) -> abi.Choice:
        """Return what would run for a problem."""
        choice = abi.Choice()
        self.call("nvfp4_choose", ctypes.byref(problem), ctypes.byref(choice))
        return choice

    def moe_plan_bytes(self, m_max: int, top_k: int, experts: int) -> int:
        """Return the bytes of a routing plan for every m up to `m_max`."""
        return self.query("nvfp4_moe_plan_bytes", m_max, top_k, experts)

    def moe_plan(
        self,
        topk_ids: int,
        m: int,
        *,
        top_k: int,
        experts: int,
        plan: int,
        plan_bytes: int,
        expert_map: int = 0,
        map_size: int = 0,
        stream: int = 0,
    ) -> None:
        """Make the routing plan for topk_ids int32 [m, top_k]."""
        self.call(
            *("nvfp4_moe_plan", topk_ids, m, top_k, experts, expert_map, map_size),
            *(plan, plan_bytes, stream),
        )

    def moe_workspace_bytes(
        self, gate_up: abi.Weight | None, down: abi.Weight | None, m_max: int, top_k: int
    ) -> int:
        """Return the bytes of workspace that suffice for both grouped products."""
        handles = [None if each is None else ctypes.byref(each) for each in (gate_up, down)]
        return self.query("nvfp4_moe_workspace_bytes", *handles, m_max, top_k)

    def moe_gate_up(
        self,
        weight: abi.Weight,
        m: int,
        *,
        top_k: int,
        plan: int,
        plan_bytes: int,
        io_type: abi.Type,
        x: int,
        x_stride: int,
        y: int,
        y_stride: int,
        workspace: int,
        workspace_bytes: int,
        stream: int = 0,
    ) -> None:
        """Compute y[m * top_k, n / 2] = silu(gate) * up for each routed pair."""
        self.call(
            *("nvfp4_moe_gate_up", ctypes.byref(weight), plan, plan_bytes, io_type, m, top_k),
            *(x, x_stride, y, y_stride, workspace, workspace_bytes, stream),
        )

    def moe_down(
        self,
        weight: abi.Weight,
        m: int,
        *,
        top_k: int,
        plan: int,
        plan_bytes: int,
        io_type: abi.Type,
        x: int,
        x_stride: int,
        topk_weights: int,
        y: int,
        y_stride: int,
        workspace: int,
        workspace_bytes: int,
        stream: int = 0,
    ) -> None:
        """Compute y[m, n], the weighted sum over each token's experts."""
        self.call(
            *("nvfp4_moe_down", ctypes.byref(weight), plan, plan_bytes, io_type, m, top_k),
            *(x, x_stride, topk_weights, y, y_stride, workspace, workspace_bytes, stream),
        )

    # ---- small operations

    def topk_softmax(
        self,
        logits: int,
        m: int,
        *,
        experts: int,
        top_k: int,
        logits_type: abi.Type,
        logits_stride: int,
        renormalize: bool,
        ids: int,
        weights: int,
        stream: int = 0,
    ) -> None:
        """Route: ids int32 and weights FP32 [m, top_k] of the largest softmax values."""
        self.call(
            *("nvfp4_topk_softmax", logits_type, m, experts, top_k, logits, logits_stride),
            *(int(renormalize), ids, weights, stream),
        )

    def rms_norm(self, norm: abi.Norm, *, stream: int = 0) -> None:
        """Normalise rows, after adding them to a residual if there is one."""
        self.call("nvfp4_rms_norm", ctypes.byref(norm), stream)

    def silu_mul(
        self,
        rows: int,
        width: int,
        *,
        io_type: abi.Type,
        x: int,
        x_stride: int,
        y: int,
        y_stride: int,
        stream: int = 0,
    ) -> None:
        """Compute y[rows, width] = silu(first half of x) * second half of x."""
        self.call("nvfp4_silu_mul", io_type, rows, width, x, x_stride, y, y_stride, stream)

    def rotary_write_kv(self, rotary: abi.Rotary, *, stream: int = 0) -> None:
        """Rotate q and k in place and write k and v into the paged cache."""
        self.call("nvfp4_rotary_write_kv", ctypes.byref(rotary), stream)

    # ---- the rest

    def self_test(self, device: int = 0) -> abi.SelfTestResult:
        """Run the fixed problems on a device and return the measures; raise if one is wrong."""
        result = abi.SelfTestResult()
        self.call("nvfp4_self_test", device, ctypes.byref(result))
        return result

    def dequantize_source(
        self,
        source: abi.Source,
        out: int,
        *,
        out_type: abi.Type,
        out_stride: int,
        flags: abi.Dequantize = abi.Dequantize.NONE,
    ) -> None:
        """Write canonical host tensors as [n, k]; the reference library only."""
        self.call(
            *("nvfp4_dequantize_source", ctypes.byref(source), flags, out_type, out, out_stride)
        )

    def set_threads(self, threads: int) -> None:
        """Set the threads of the reference library, 1 to 64; 0 means every allowed CPU."""
        self.call("nvfp4_set_threads", threads)

    def query(self, name: str, *arguments: object) -> int:
        """Call a function whose last argument is an int64 to fill, and return it."""
        size = ctypes.c_int64(0)
        self.call(name, *arguments, ctypes.byref(size))
        return size.value

    def call(self, name: str, *arguments: object) -> None:
        """Call a function that returns a status.

        Raises:
            LibraryError: If it refuses the call.
        """
        status = int(getattr(self._dll, name)(*arguments))
        if status != abi.Status.OK:
            sentence = bytes(self._dll.nvfp4_last_error()).decode(errors="replace")
            raise refused(name, status, sentence)


@functools.cache
def reference_library() -> Library:
    """Return libnvfp4_ref.so, which computes on host memory.

    Raises:
        LibraryError: If it is not built, or of another version.
    """
    return Library(LIBRARY_DIR / "libnvfp4_ref.so")


@functools.cache
def sm70_library() -> Library:
    """Return libnvfp4_sm70.so, which computes on a Volta GPU.

    Raises:
        LibraryError: If it is not built, or of another version.
    """
    return Library(LIBRARY_DIR / "libnvfp4_sm70.so")
