"""Attention over the paged KV cache: the structs and calls of kernels/include/nvfp4_attention.h.

Addresses are integers as `ndarray.ctypes.data` and `Tensor.data_ptr()` give them; the header says
what the fields mean.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from appliance.nvfp4.abi import Sized

if TYPE_CHECKING:
    from appliance.nvfp4.calls import Calls

__all__ = ["SIGNATURES", "Attention", "CacheRows", "attend", "workspace_bytes", "write_kv"]

_INT = ctypes.c_int32
_UINT = ctypes.c_uint32
_LONG = ctypes.c_int64
_POINTER = ctypes.c_void_p


class Attention(Sized):
    """nvfp4_attention: a batch of sequences; query and out [tokens, q_heads, head_dim]."""

    tokens: int
    sequences: int
    decode_sequences: int
    decode_query_len: int
    max_seq_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    seq_lens: int | None
    out: int | None
    _fields_ = (
        ("struct_size", _UINT),
        ("io_type", _INT),
        ("tokens", _LONG),
        ("sequences", _LONG),
        ("decode_sequences", _LONG),
        ("decode_query_len", _LONG),
        ("max_seq_len", _LONG),
        ("q_heads", _LONG),
        ("kv_heads", _LONG),
        ("head_dim", _LONG),
        ("window", _LONG),
        ("scale", ctypes.c_float),
        ("reserved", _INT),
        ("query", _POINTER),
        ("query_stride", _LONG),
        ("query_start", _POINTER),
        ("seq_lens", _POINTER),
        ("block_table", _POINTER),
        ("block_table_stride", _LONG),
        ("k_cache", _POINTER),
        ("v_cache", _POINTER),
        ("block_size", _LONG),
        ("cache_block_stride", _LONG),
        ("cache_token_stride", _LONG),
        ("cache_head_stride", _LONG),
        ("out", _POINTER),
        ("out_stride", _LONG),
    )


class CacheRows(Sized):
    """nvfp4_cache_rows: rows of k and v, and the cache that they go into."""

    tokens: int
    kv_heads: int
    head_dim: int
    _fields_ = (
        ("struct_size", _UINT),
        ("io_type", _INT),
        ("tokens", _LONG),
        ("kv_heads", _LONG),
        ("head_dim", _LONG),
        ("k", _POINTER),
        ("k_stride", _LONG),
        ("v", _POINTER),
        ("v_stride", _LONG),
        ("slots", _POINTER),
        ("k_cache", _POINTER),
        ("v_cache", _POINTER),
        ("blocks", _LONG),
        ("block_size", _LONG),
        ("cache_block_stride", _LONG),
        ("cache_token_stride", _LONG),
        ("cache_head_stride", _LONG),
    )


SIGNATURES: dict[str, tuple[type[object], ...]] = {
    "nvfp4_attend_workspace_bytes": (_POINTER, _POINTER),
    "nvfp4_attend": (_POINTER, _POINTER, _LONG, _POINTER),
    "nvfp4_write_kv": (_POINTER, _POINTER),
}
"""Argument types of every call of the header, as `abi.SIGNATURES`."""


def workspace_bytes(library: Calls, attention: Attention) -> int:
    """Return the bytes that suffice for these sizes and smaller ones; pointers are not read.

    Raises:
        LibraryError: NVFP4_EUNSUPPORTED where the library has no kernel for the sizes.
    """
    return library.query("nvfp4_attend_workspace_bytes", ctypes.byref(attention))


def attend(
    library: Calls,
    attention: Attention,
    *,
    workspace: int = 0,
    workspace_bytes: int = 0,
    stream: int = 0,
) -> None:
    """Compute causal attention of every query over the keys of its sequence."""
    library.call("nvfp4_attend", ctypes.byref(attention), workspace, workspace_bytes, stream)


def write_kv(library: Calls, rows: CacheRows, *, stream: int = 0) -> None:
    """Write rows of k and v into their slots of the cache."""
    library.call("nvfp4_write_kv", ctypes.byref(rows), stream)
