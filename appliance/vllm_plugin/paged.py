"""Attention over a paged cache with the kernel library: torch tensors in, one call each.

The cache is vLLM's, [blocks, kv_heads, block_size, 2 * size] by any strides: a head's value lies
behind its key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.nvfp4 import attention
from appliance.vllm_plugin.device import address_of, library_of, room, stream_of, type_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Heads:
    """The sizes of one layer.

    Attributes:
        queries: Query heads, a multiple of `keys`.
        keys: KV heads.
        size: Elements of a head.
        scale: Of query times key.
        window: Keys that a query sees, itself included; 0 is all.
    """

    queries: int
    keys: int
    size: int
    scale: float
    window: int = 0


@dataclass
class Step:
    """One step of a batch, the same for every layer.

    Attributes:
        tokens: Rows of the step that belong to a sequence.
        decodes: Leading sequences with at most `decode_length` queries each.
        decode_length: Queries of one sequence that count as a decode.
        max_length: No sequence is longer.
        query_start: int32 [sequences + 1], first row of each.
        lengths: int32 [sequences], keys of each.
        block_table: int32 [sequences, ...].
        slots: int64 [tokens], where the step's keys go.
    """

    tokens: int
    decodes: int
    decode_length: int
    max_length: int
    query_start: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor


def attend(
    heads: Heads, query: torch.Tensor, kv_cache: torch.Tensor, step: Step, output: torch.Tensor
) -> None:
    """Write the result of each query; the step's keys are in the cache already.

    Args:
        heads: Sizes of the layer.
        query: [tokens, query heads, size], heads contiguous.
        kv_cache: [blocks, KV heads, block_size, 2 * size].
        step: The batch.
        output: As the query, or [tokens, query heads * size].

    Raises:
        LibraryError: If the library refuses the call.
    """
    device = query.device
    library = library_of(device)
    arguments = attention.Attention(
        io_type=type_of(query),
        tokens=step.tokens,
        sequences=step.lengths.shape[0],
        decode_sequences=step.decodes,
        decode_query_len=step.decode_length,
        max_seq_len=step.max_length,
        q_heads=heads.queries,
        kv_heads=heads.keys,
        head_dim=heads.size,
        window=heads.window,
        scale=heads.scale,
        query=query.data_ptr(),
        query_stride=query.stride(0),
        query_start=step.query_start.data_ptr(),
        seq_lens=step.lengths.data_ptr(),
        block_table=step.block_table.data_ptr(),
        block_table_stride=step.block_table.stride(0),
        out=output.data_ptr(),
        out_stride=output.stride(0),
        block_size=kv_cache.shape[2],
        **_cache(kv_cache, heads.size),
    )
    workspace = room(attention.workspace_bytes(library, arguments), device)
    attention.attend(
        library,
        arguments,
        workspace=address_of(workspace),
        workspace_bytes=workspace.numel(),
        stream=stream_of(device),
    )


def write(
    heads: Heads,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write keys and values, [tokens or more, KV heads, size], to the slots of the tokens.

    Raises:
        LibraryError: If the library refuses the call.
    """
    if not slots.shape[0]:
        return
    rows = attention.CacheRows(
        io_type=type_of(key),
        tokens=slots.shape[0],
        kv_heads=heads.keys,
        head_dim=heads.size,
        k=key.data_ptr(),
        k_stride=key.stride(0),
        v=value.data_ptr(),
        v_stride=value.stride(0),
        slots=slots.data_ptr(),
        blocks=kv_cache.shape[0],
        block_size=kv_cache.shape[2],
        **_cache(kv_cache, heads.size),
    )
    attention.write_kv(library_of(key.device), rows, stream=stream_of(key.device))


def _cache(kv_cache: torch.Tensor, size: int) -> dict[str, int]:
    """Return where keys and values lie."""
    begin = kv_cache.data_ptr()
    return {
        "k_cache": begin,
        "v_cache": begin + size * kv_cache.element_size(),
        "cache_block_stride": kv_cache.stride(0),
        "cache_head_stride": kv_cache.stride(1),
        "cache_token_stride": kv_cache.stride(2),
    }
