"""Products with packed NVFP4 weights as `torch.library` operations over the C ABI.

Each is one opaque node of known result shape: which kernel runs for how many tokens is decided in
the library. Nothing is synchronised, memory comes from torch's allocator, so graphs capture them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, cast

import torch

from appliance.nvfp4 import abi
from appliance.vllm_plugin.device import address_of, library_of, room, stream_of, type_of
from appliance.vllm_plugin.registry import define

if TYPE_CHECKING:
    from appliance.nvfp4.library import Library
    from appliance.vllm_plugin.resident import Resident

_ALIGNMENT = 16  # bytes; of activations and of their rows
SLICE_BYTES = 64 << 20
"""The plan's share of activations for the work of kernels (appliance/plan/estimates.py)."""

_ROW_STEP = 64
_SLICED_GROUP = 16  # what E4M3 scales of any group are stored as


def linear(x: torch.Tensor, weight: Resident, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x * w^T + bias.

    Args:
        x: float16 [..., K]; K may lack the columns that padded the stored matrix.
        weight: [N, K].
        bias: float16 [N].

    Returns:
        float16 [..., N].

    Raises:
        LibraryError: If the library refuses the call.
    """
    result = torch.ops.nvfp4.linear(x, weight.buffer, weight.handle, weight.rows, bias)
    return cast("torch.Tensor", result)


def experts(
    x: torch.Tensor,
    gate_up: Resident,
    down: Resident,
    *,
    weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, each down(silu(gate(x)) * up(x)).

    Args:
        x: float16 [tokens, hidden].
        gate_up: [E, 2 I, hidden].
        down: [E, hidden, I].
        weights: float32 [tokens, top_k].
        ids: int32 [tokens, top_k], global; others than this rank's experts add nothing.
        expert_map: int32, from global to local ids; None if they are the same.

    Returns:
        float16 [tokens, hidden]; the sum over experts is kept in FP32.

    Raises:
        LibraryError: If the library refuses a call.
    """
    result = torch.ops.nvfp4.packed_experts(
        *(x, gate_up.buffer, gate_up.handle, down.buffer, down.handle),
        *(weights, ids, expert_map),
    )
    return cast("torch.Tensor", result)


def _handle(handle: torch.Tensor) -> abi.Weight:
    """Return the C struct in place; the tensor outlives the call."""
    return abi.Weight.from_address(handle.data_ptr())


def _activations(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Return x as aligned rows of `columns`; the stored padding of a matrix meets zeros."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[1] < columns:
        return torch.nn.functional.pad(rows, (0, columns - rows.shape[1]))
    row_bytes = rows.stride(0) * rows.element_size()
    is_aligned = rows.data_ptr() % _ALIGNMENT == 0 and row_bytes % _ALIGNMENT == 0
    if rows.stride(1) == 1 and is_aligned:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=4096)
def _slice_rows(device: torch.device, m: int, n: int, k: int) -> int:
    """Return how many rows to decode at a time, 0 where the library's product is faster."""
    problem = abi.Problem(
        kind=abi.WeightKind.LINEAR,
        m=m,
        n=n,
        k=k,
        experts=1,
        top_k=1,
        group=_SLICED_GROUP,
        scale_type=abi.Type.E4M3,
    )
    choice = library_of(device).choose(problem)
    return bounded_rows(choice.slice_rows, m, k) if choice.kernel == abi.Kernel.DEQUANTIZE else 0


def bounded_rows(rows: int, m: int, k: int) -> int:
    """Return at most `rows`, so that decoded rows and their FP32 sums stay in what is planned."""
    fitting = SLICE_BYTES // (2 * k + 4 * m) // _ROW_STEP * _ROW_STEP
    return min(rows, max(_ROW_STEP, fitting))


def _linear(
    x: torch.Tensor,
    buffer: torch.Tensor,
    handle: torch.Tensor,
    n: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    weight = _handle(handle)
    rows = _activations(x, weight.k)
    result = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    y = result.view(-1, n)
    m = rows.shape[0]
    if not m:
        return result
    # Without its global, a code times an E4M3 scale is exact in FP16; with others it is not.
    is_exact = weight.scale_type == abi.Type.E4M3
    slice_rows = _slice_rows(x.device, m, n, weight.k) if is_exact else 0
    if slice_rows:
        _linear_in_slices(rows, buffer, weight, y, bias, slice_rows)
        return result
    library = library_of(x.device)
    workspace = room(library.matmul_workspace_bytes(weight, m), x.device)
    library.matmul(
        weight,
        m,
        io_type=type_of(x),
        x=rows.data_ptr(),
        x_stride=rows.stride(0),
        y=y.data_ptr(),
        y_stride=n,
        bias=address_of(bias),
        workspace=address_of(workspace),
        workspace_bytes=workspace.numel(),
        stream=stream_of(x.device),
    )
    return result


def _linear_in_slices(  # noqa: PLR0917 - one caller
    x: torch.Tensor,
    buffer: torch.Tensor,
    weight: abi.Weight,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    slice_rows: int,
) -> None:
    """Decode rows without their globals, which is exact, and let the vendor's GEMM do the rest.

    The globals meet the FP32 sums, as in the kernels.
    """
    library, n = library_of(x.device), y.shape[1]
    is_divisor = weight.global_kind == abi.GlobalKind.DIVISOR
    globals_ = _globals(buffer, weight)
    codes = torch.empty((slice_rows, weight.k), dtype=torch.float16, device=x.device)
    for begin in range(0, n, slice_rows):
        end = min(n, begin + slice_rows)
        library.dequantize(
            weight,
            codes.data_ptr(),
            out_type=abi.Type.F16,
            out_stride=weight.k,
            row_begin=begin,
            rows=end - begin,
            flags=abi.Dequantize.UNSCALED,
            stream=stream_of(x.device),
        )
        sums = _product(x, codes[: end - begin])
        sums = sums.div_(globals_[begin:end]) if is_divisor else sums.mul_(globals_[begin:end])
        if bias is not None:
            sums.add_(bias[begin:end])
        y[:, begin:end] = sums


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return x * w^T as FP32 sums of FP16 products."""
    return torch.mm(x, w.t(), out_dtype=torch.float32)


def _globals(buffer: torch.Tensor, weight: abi.Weight) -> torch.Tensor:
    """Return the globals of a dense weight's rows as they lie in its buffer."""
    begin = (weight.globals or 0) - (weight.buffer or 0)
    return buffer[begin : begin + 4 * weight.n].view(torch.float32)


def _fake_linear(
    x: torch.Tensor,
    buffer: torch.Tensor,
    handle: torch.Tensor,
    n: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    del buffer, handle, bias
    return x.new_empty((*x.shape[:-1], n))


def _packed_experts(  # noqa: PLR0917 - the operation's schema
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_handle: torch.Tensor,
    down: torch.Tensor,
    down_handle: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    del gate_up, down  # their addresses are in the handles
    first, second = _handle(gate_up_handle), _handle(down_handle)
    result = torch.empty((x.shape[0], second.n), dtype=x.dtype, device=x.device)
    (m, top_k), device = ids.shape, x.device
    if not m:
        return result
    library = library_of(device)
    rows = _activations(x, first.k)
    chosen, shares = ids.to(torch.int32).contiguous(), weights.float().contiguous()
    plan = _plan(library, chosen, first.experts, expert_map)
    workspace = room(library.moe_workspace_bytes(first, second, m, top_k), device)
    hidden = torch.empty((m * top_k, first.n // 2), dtype=x.dtype, device=device)
    shared = {
        "top_k": top_k,
        "plan": plan.data_ptr(),
        "plan_bytes": plan.numel(),
        "workspace": address_of(workspace),
        "workspace_bytes": workspace.numel(),
        "stream": stream_of(device),
    }
    library.moe_gate_up(
        first,
        m,
        io_type=type_of(x),
        x=rows.data_ptr(),
        x_stride=rows.stride(0),
        y=hidden.data_ptr(),
        y_stride=hidden.stride(0),
        **shared,
    )
    library.moe_down(
        second,
        m,
        io_type=type_of(x),
        x=hidden.data_ptr(),
        x_stride=hidden.stride(0),
        topk_weights=shares.data_ptr(),
        y=result.data_ptr(),
        y_stride=result.stride(0),
        **shared,
    )
    return result


def _plan(
    library: Library, ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None
) -> torch.Tensor:
    """Return the plan of which expert computes what, from int32 ids [tokens, top_k]."""
    m, top_k = ids.shape
    plan = room(library.moe_plan_bytes(m, top_k, experts), ids.device)
    library.moe_plan(
        ids.data_ptr(),
        m,
        top_k=top_k,
        experts=experts,
        plan=plan.data_ptr(),
        plan_bytes=plan.numel(),
        expert_map=address_of(expert_map),
        map_size=0 if expert_map is None else expert_map.numel(),
        stream=stream_of(ids.device),
    )
    return plan


def _fake_packed_experts(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x)


define(
    "nvfp4",
    "linear(Tensor x, Tensor buffer, Tensor handle, int n, Tensor? bias) -> Tensor",
    _linear,
    _fake_linear,
)
define(
    "nvfp4",
    "packed_experts(Tensor x, Tensor gate_up, Tensor gate_up_handle, Tensor down, "
    "Tensor down_handle, Tensor weights, Tensor ids, Tensor? expert_map) -> Tensor",
    _packed_experts,
    _fake_packed_experts,
)
