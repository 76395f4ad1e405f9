"""Batches of attention over a paged cache: random data, poison around it, and the FP64 result."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from appliance.nvfp4 import abi
from appliance.nvfp4 import attention as binding

if TYPE_CHECKING:
    from sm70_rig import Rig

UNTOUCHED = 7.25
"""What `out` holds before the call."""

NO_BLOCK = 2**30
"""Entries of the block table that must not be used: far outside of the cache."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a batch; `query_lens` and `seq_lens` are those of each sequence.

    `layout`: how a block is stored. `nhd` and `hnd` keep a head's value behind its key, token by
    token or head by head; `split` has a cache for keys and one for values, and padded blocks.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    decode_sequences: int = 0
    decode_query_len: int = 1
    window: int = 0
    layout: str = "nhd"
    dtype: type = np.float16
    spread: float = 1.0
    max_seq_len: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def longest(self) -> int:
        return max(self.max_seq_len, *self.seq_lens, 1)


class Batch:
    """The arrays of one batch. What a call must not use is NaN, or a block that does not exist."""

    def __init__(self, rng: np.random.Generator, shape: Shape) -> None:
        self.shape = shape
        s = shape
        self.scale = float(np.float32(s.head_dim**-0.5))
        width = s.q_heads * s.head_dim
        # Two rows and a column more than are used.
        self.query = np.full((s.tokens + 2, width + 8), np.nan, s.dtype)
        self.query[: s.tokens, :width] = s.spread * rng.standard_normal((s.tokens, width))
        self.query_start = np.cumsum((0, *s.query_lens)).astype(np.int32)
        self.seq_lens = np.array(s.seq_lens, np.int32)
        self._fill_cache(rng)

    def _fill_cache(self, rng: np.random.Generator) -> None:
        s = self.shape
        used = [-(-length // s.block_size) for length in s.seq_lens]
        self.blocks = sum(used) + 2
        ids = rng.permutation(self.blocks)
        self.block_table = np.full((len(used), max(used) + 3), NO_BLOCK, np.int32)
        dims = {
            "nhd": (s.block_size, s.kv_heads, 2 * s.head_dim),
            "hnd": (s.kv_heads, s.block_size, 2 * s.head_dim),
            "split": (s.block_size + 1, s.kv_heads, s.head_dim),
        }[s.layout]
        caches = 2 if s.layout == "split" else 1
        self.cache = np.full((caches, self.blocks, *dims), np.nan, s.dtype)
        k, v = self.views()
        self.keys, self.values = [], []
        for sequence, (count, length) in enumerate(zip(used, s.seq_lens, strict=True)):
            mine, ids = ids[:count], ids[count:]
            self.block_table[sequence, :count] = mine
            data = rng.standard_normal((2, length, s.kv_heads, s.head_dim)).astype(s.dtype)
            at = np.arange(length)
            block, offset = mine[at // s.block_size], at % s.block_size
            k[block, offset], v[block, offset] = data
            self.keys.append(data[0])
            self.values.append(data[1])
            self._poison_hidden(sequence, k, v)

    def _poison_hidden(self, sequence: int, k: np.ndarray, v: np.ndarray) -> None:
        """Make NaN of keys that no query sees, as blocks that a window has left behind."""
        s = self.shape
        first_position = s.seq_lens[sequence] - s.query_lens[sequence]
        hidden = np.arange(max(first_position - s.window + 1, 0) if s.window else 0)
        block = self.block_table[sequence, hidden // s.block_size]
        k[block, hidden % s.block_size] = v[block, hidden % s.block_size] = np.nan
        self.block_table[sequence, : hidden.size // s.block_size] = NO_BLOCK

    def views(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values as [blocks, block_size, kv_heads, head_dim] of the same memory."""
        s = self.shape
        if s.layout == "split":
            return self.cache[0][:, : s.block_size], self.cache[1][:, : s.block_size]
        cache = self.cache[0] if s.layout == "nhd" else self.cache[0].swapaxes(1, 2)
        return cache[..., : s.head_dim], cache[..., s.head_dim :]

    def strides(self) -> tuple[int, int, int, int]:
        """Elements from block to block, token to token, head to head, and from key to value."""
        k, v = self.views()
        size = k.itemsize
        block, token, head = (each // size for each in k.strides[:3])
        return block, token, head, (v.ctypes.data - k.ctypes.data) // size

    def right(self) -> np.ndarray:
        """FP64 [tokens, q_heads, head_dim]."""
        s = self.shape
        ratio = s.q_heads // s.kv_heads
        query = self.query[: s.tokens, : s.q_heads * s.head_dim].astype(np.float64)
        query = query.reshape(s.tokens, s.kv_heads, ratio, s.head_dim)
        out = np.zeros((s.tokens, s.kv_heads, ratio, s.head_dim))
        for sequence, (count, length) in enumerate(zip(s.query_lens, s.seq_lens, strict=True)):
            begin = int(self.query_start[sequence])
            keys = self.keys[sequence].astype(np.float64)
            values = self.values[sequence].astype(np.float64)
            for i in range(count):
                last = length - count + i + 1
                first = max(last - s.window, 0) if s.window else 0
                if last <= first:
                    continue
                scores = np.einsum("hrd,jhd->hrj", query[begin + i], keys[first:last]) * self.scale
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                weights /= weights.sum(-1, keepdims=True)
                out[begin + i] = np.einsum("hrj,jhd->hrd", weights, values[first:last])
        return out.reshape(s.tokens, s.q_heads, s.head_dim)


@dataclass(frozen=True)
class Placed:
    """A batch in device memory, ready to be called any number of times."""

    rig: Rig
    batch: Batch
    call: binding.Attention
    workspace: int
    workspace_bytes: int

    def run(self, *, stream: int = 0) -> None:
        binding.attend(
            self.rig.library,
            self.call,
            workspace=self.workspace,
            workspace_bytes=self.workspace_bytes,
            stream=stream,
        )

    def result(self) -> np.ndarray:
        """[tokens, q_heads, head_dim]. Memory around it must be as it was."""
        s = self.batch.shape
        width = s.q_heads * s.head_dim
        found = self.rig.get(int(self.call.out or 0), (s.tokens + 2, width + 8), s.dtype)
        assert (found[s.tokens :] == UNTOUCHED).all(), "wrote a row that belongs to no sequence"
        assert (found[:, width:] == UNTOUCHED).all(), "wrote past the last head"
        return found[: s.tokens, :width].reshape(s.tokens, s.q_heads, s.head_dim)


def place(rig: Rig, batch: Batch) -> Placed:
    """Put one batch into device memory; the workspace is NaN, it needs no initial value."""
    s = batch.shape
    block, token, head, value = batch.strides()
    cache = rig.put(batch.cache)
    width = s.q_heads * s.head_dim
    call = binding.Attention(
        io_type=abi.Type.F16 if s.dtype is np.float16 else abi.Type.F32,
        tokens=s.tokens + 2,
        sequences=len(s.seq_lens),
        decode_sequences=s.decode_sequences,
        decode_query_len=s.decode_query_len,
        max_seq_len=s.longest,
        q_heads=s.q_heads,
        kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        window=s.window,
        scale=batch.scale,
        query=rig.put(batch.query),
        query_stride=width + 8,
        query_start=rig.put(batch.query_start),
        seq_lens=rig.put(batch.seq_lens),
        block_table=rig.put(batch.block_table),
        block_table_stride=batch.block_table.shape[1],
        k_cache=cache,
        v_cache=cache + value * batch.cache.itemsize,
        block_size=s.block_size,
        cache_block_stride=block,
        cache_token_stride=token,
        cache_head_stride=head,
        out=rig.put(np.full((s.tokens + 2, width + 8), UNTOUCHED, s.dtype)),
        out_stride=width + 8,
    )
    needed = binding.workspace_bytes(rig.library, call)
    workspace = rig.put(np.full(needed, 0xFF, np.uint8)) if needed else 0
    return Placed(rig, batch, call, workspace, needed)


def attend(rig: Rig, batch: Batch) -> np.ndarray:
    """Run one batch; [tokens, q_heads, head_dim]."""
    placed = place(rig, batch)
    placed.run()
    return placed.result()


def random_shape(rng: np.random.Generator, *, longest: int, base: Shape | None = None) -> Shape:
    """Draw lengths, ratio, block size and layout; the head's size and element type are `base`'s."""
    base = base or Shape((1,), (1,))
    sequences = int(rng.integers(1, 5))
    seq_lens = tuple(int(n) for n in np.exp(rng.uniform(0, np.log(longest), sequences)).astype(int))
    decode = int(rng.integers(0, sequences + 1))
    decode_len = int(rng.integers(1, 4))
    query_lens = tuple(
        int(rng.integers(1, min(length, decode_len) + 1))
        if i < decode
        else int(rng.integers(1, min(length, 80) + 1))
        for i, length in enumerate(seq_lens)
    )
    kv_heads = int(rng.integers(1, 3))
    return replace(
        base,
        query_lens=query_lens,
        seq_lens=seq_lens,
        kv_heads=kv_heads,
        q_heads=kv_heads * int(rng.integers(1, 17)),
        block_size=16 * int(rng.integers(1, 6)),
        decode_sequences=decode,
        decode_query_len=decode_len,
        window=int(rng.integers(1, longest)) if rng.random() < 0.3 else 0,
        layout=str(rng.choice(("nhd", "hnd", "split"))),
        max_seq_len=int(rng.integers(0, 2 * longest)),
    )


class HostMemory:
    """Host memory as a device's, for the reference library."""

    def __init__(self) -> None:
        self._held: dict[int, np.ndarray] = {}

    def allocate(self, nbytes: int) -> int:
        raw = np.empty(nbytes + 256, np.uint8)
        address = int(raw.ctypes.data + -raw.ctypes.data % 256)
        self._held[address] = raw
        return address

    def release(self, address: int) -> None:
        del self._held[address]

    def write(self, address: int, array: np.ndarray) -> None:
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)
