"""The operations that vLLM asks of its own CUDA extension, on the kernel library instead.

`vllm/_C_stable_libtorch.py`, a file that a patch of the build adds to the wheel, calls `define()`:
so every process that imports vLLM on a GPU has them, the ones that only inspect models too. Nothing
of vLLM is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.nvfp4 import abi
from appliance.vllm_plugin import registry
from appliance.vllm_plugin.device import GPU_LIBRARY, library_of, stream_of, type_of

if TYPE_CHECKING:
    from collections.abc import Callable

_TORCH = "torch"


@dataclass(frozen=True)
class Operation:
    """One operation of vLLM's extension.

    Attributes:
        namespace: `_C`, `_moe_C` or `_C_cache_ops`.
        schema: Name, arguments and result as torch reads them.
        function: What runs on tensors of every device.
        runs_on: What computes it, for the table in the log.
    """

    namespace: str
    schema: str
    function: Callable[..., Any]
    runs_on: str

    @property
    def name(self) -> str:
        """Namespace and name, as in `torch.ops`."""
        return f"{self.namespace}.{self.schema.partition('(')[0]}"


def rms_norm(
    result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    """Write x / rms(x) * weight, over the last dimension, in FP32 with one rounding."""
    rows = _rows(x)
    out = result if result.is_contiguous() else torch.empty_like(x)
    _norm(rows, out.view(rows.shape), None, weight, epsilon)
    if out is not result:
        result.copy_(out)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    """Add x to the residual, then write the norm of the sum into x; both in place."""
    rows, sums = _rows(x), _rows(residual)
    _norm(rows, rows, sums, weight, epsilon)
    for target, computed in ((x, rows), (residual, sums)):
        if computed.data_ptr() != target.data_ptr():
            target.copy_(computed.view(target.shape))


def silu_and_mul(result: torch.Tensor, x: torch.Tensor) -> None:
    """Write silu(first half) * second half of the last dimension."""
    rows = _rows(x)
    width = rows.shape[1] // 2
    if not rows.shape[0]:
        return
    out = result.view(-1, width)
    library_of(x.device).silu_mul(
        rows.shape[0],
        width,
        io_type=type_of(x),
        x=rows.data_ptr(),
        x_stride=rows.stride(0),
        y=out.data_ptr(),
        y_stride=out.stride(0),
        stream=stream_of(x.device),
    )


def rotary_embedding(  # noqa: PLR0917 - the engine's schema
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate heads in place; query and key are [tokens, heads * head_size] or have head axes.

    Raises:
        ApplianceError: E_ROTARY for an offset or an inverse rotation.
    """
    if rope_dim_offset or inverse:
        value = f"offset {rope_dim_offset}, inverse {inverse}"
        what, fix = "rotations begin at element 0 and go forward", "serve another model"
        fault = Fault("E_ROTARY", "rotary_embedding", what, value, fix)
        raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)
    places = positions.reshape(-1)
    tokens = places.shape[0]
    if not tokens:
        return
    second = query if key is None else key
    queries, keys = query.view(tokens, -1), second.view(tokens, -1)
    rotary = abi.Rotary(
        io_type=type_of(query),
        tokens=tokens,
        q_heads=queries.shape[1] // head_size,
        kv_heads=keys.shape[1] // head_size,
        head_dim=head_size,
        rotary_dim=cos_sin_cache.shape[1],
        is_neox=int(is_neox),
        cos_sin_type=type_of(cos_sin_cache),
        cos_sin=cos_sin_cache.data_ptr(),
        max_position=cos_sin_cache.shape[0],
        positions=places.data_ptr(),
        q=None if key is None else queries.data_ptr(),
        q_stride=queries.stride(0),
        k=keys.data_ptr(),
        k_stride=keys.stride(0),
    )
    library_of(query.device).rotary_write_kv(rotary, stream=stream_of(query.device))


def reshape_and_cache_flash(  # noqa: PLR0917 - the engine's schema
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write keys and values [tokens, heads, size] to their slots of [blocks, tokens, heads, size].

    Raises:
        ApplianceError: E_KV_TYPE for a cache of another type than the keys.
    """
    del k_scale, v_scale  # of eight-bit caches only
    if key_cache.dtype != key.dtype or value_cache.stride() != key_cache.stride():
        what, fix = "the cache must have the type of the keys", "set memory.kv_cache_dtype: auto"
        fault = Fault("E_KV_TYPE", "memory.kv_cache_dtype", what, kv_cache_dtype, fix)
        raise ApplianceError(ExitCode.ENGINE_START, fault)
    tokens = slot_mapping.shape[0]  # keys may be padded beyond it
    if not tokens:
        return
    blocks, block_size, heads, size = key_cache.shape
    keys, values = (tensor[:tokens].reshape(tokens, -1) for tensor in (key, value))
    rotary = abi.Rotary(
        io_type=type_of(key),
        tokens=tokens,
        q_heads=0,
        kv_heads=heads,
        head_dim=size,
        k=keys.data_ptr(),
        k_stride=keys.stride(0),
        v=values.data_ptr(),
        v_stride=values.stride(0),
        slots=slot_mapping.data_ptr(),
        k_cache=key_cache.data_ptr(),
        v_cache=value_cache.data_ptr(),
        blocks=blocks,
        block_size=block_size,
        cache_block_stride=key_cache.stride(0),
        cache_token_stride=key_cache.stride(1),
        cache_head_stride=key_cache.stride(2),
    )
    library_of(key.device).rotary_write_kv(rotary, stream=stream_of(key.device))


def topk_softmax(  # noqa: PLR0917 - the engine's schema
    weights: torch.Tensor,
    ids: torch.Tensor,
    rows: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None,
) -> None:
    """Write the top_k largest softmax weights of each token and their experts.

    `rows` is for kernels that are not here, and stays unwritten. A padded token is routed like any
    other: its result is dropped by the engine.
    """
    del rows, is_padding
    if bias is not None:
        _topk_with_bias(weights, ids, logits, renormalize, bias)
        return
    tokens, top_k = ids.shape
    if not tokens:
        return
    scores = logits if logits.stride(1) == 1 else logits.contiguous()
    chosen = ids if ids.dtype == torch.int32 else torch.empty_like(ids, dtype=torch.int32)
    library_of(logits.device).topk_softmax(
        scores.data_ptr(),
        tokens,
        experts=scores.shape[1],
        top_k=top_k,
        logits_type=type_of(scores),
        logits_stride=scores.stride(0),
        renormalize=renormalize,
        ids=chosen.data_ptr(),
        weights=weights.data_ptr(),
        stream=stream_of(logits.device),
    )
    if chosen is not ids:
        ids.copy_(chosen)


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor: graphs keep their small outputs alive."""
    return tensor.view_as(tensor)


def apply_repetition_penalties(
    logits: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_mask: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """Divide positive logits of tokens that occurred by a row's penalty, multiply the others by it.

    In place; logits and both masks (bool) are [rows, vocabulary], penalties [rows]. The engine asks
    for it as soon as one request of a step has a repetition, presence or frequency penalty.
    """
    penalty = penalties.unsqueeze(1)
    factor = torch.where(logits > 0, 1.0 / penalty, penalty)
    logits.mul_(factor.masked_fill_(~(prompt_mask | output_mask), 1.0))


def no(capability: int) -> bool:
    """Answer a question for kernels of newer GPUs."""
    del capability
    return False


_LIBRARY = f"{GPU_LIBRARY} (float16, float32)"
_QUESTIONS = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
    "mxfp4_experts_quant_supported",
)

OPERATIONS = (
    Operation(
        "_C",
        "rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
        rms_norm,
        _LIBRARY,
    ),
    Operation(
        "_C",
        "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
        fused_add_rms_norm,
        _LIBRARY,
    ),
    Operation("_C", "silu_and_mul(Tensor! result, Tensor input) -> ()", silu_and_mul, _LIBRARY),
    Operation(
        "_C",
        "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, "
        "Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
        rotary_embedding,
        _LIBRARY,
    ),
    Operation(
        "_C_cache_ops",
        "reshape_and_cache_flash(Tensor key, Tensor value, Tensor! key_cache, "
        "Tensor! value_cache, Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, "
        "Tensor v_scale) -> ()",
        reshape_and_cache_flash,
        _LIBRARY,
    ),
    Operation(
        "_moe_C",
        "topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, "
        "Tensor gating_output, bool renormalize, Tensor? bias, Tensor? is_padding) -> ()",
        topk_softmax,
        f"{_LIBRARY}; with a bias: {_TORCH}",
    ),
    Operation(
        "_C",
        "apply_repetition_penalties_(Tensor! logits, Tensor prompt_mask, Tensor output_mask, "
        "Tensor repetition_penalties) -> ()",
        apply_repetition_penalties,
        _TORCH,
    ),
    Operation(
        "_C", "weak_ref_tensor(Tensor(a) input) -> Tensor(a)", weak_ref_tensor, f"{_TORCH}: a view"
    ),
    *(
        Operation("_C", f"{name}(int cuda_device_capability) -> bool", no, "constant: no")
        for name in _QUESTIONS
    ),
)
"""Everything that is defined; what is not here stays an error that names the operation."""


@cache
def define() -> None:
    """Define the operations once in this process, with fake implementations for compilers."""
    for operation in OPERATIONS:
        fake = _writes_nothing if operation.schema.endswith("-> ()") else None
        registry.define(operation.namespace, operation.schema, operation.function, fake)


def table() -> tuple[tuple[str, str], ...]:
    """Return each operation and what it runs on."""
    return tuple((operation.name, operation.runs_on) for operation in OPERATIONS)


def _writes_nothing(*_: object, **__: object) -> None:
    """Stand in for an operation that writes into its arguments, on tensors without data."""


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as rows of its last dimension; a copy where strides allow no view."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _norm(
    x: torch.Tensor,
    y: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
) -> None:
    if not x.shape[0]:
        return
    scale = torch.ones(x.shape[1], dtype=x.dtype, device=x.device) if weight is None else weight
    norm = abi.Norm(
        io_type=type_of(x),
        weight_type=type_of(scale),
        eps=epsilon,
        rows=x.shape[0],
        hidden=x.shape[1],
        weight=scale.data_ptr(),
        x=x.data_ptr(),
        x_stride=x.stride(0),
        y=y.data_ptr(),
        y_stride=y.stride(0),
        residual=None if residual is None else residual.data_ptr(),
        residual_stride=0 if residual is None else residual.stride(0),
    )
    library_of(x.device).rms_norm(norm, stream=stream_of(x.device))


def _topk_with_bias(
    weights: torch.Tensor,
    ids: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor,
) -> None:
    """Choose by softmax plus bias; the weights are the softmax alone."""
    scores = logits.float().softmax(dim=-1)
    chosen = (scores + bias).topk(ids.shape[1], dim=-1).indices
    shares = scores.gather(1, chosen)
    weights.copy_(shares / shares.sum(dim=-1, keepdim=True) if renormalize else shares)
    ids.copy_(chosen)
