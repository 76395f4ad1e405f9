"""Batches of the gated delta rule: random data, poison around it, and the FP64 recurrence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from appliance.nvfp4 import abi
from appliance.nvfp4 import gdn as binding

if TYPE_CHECKING:
    from sm70_rig import Rig

UNTOUCHED = 7.25
"""What results hold before the call."""

NORM_EPS = 1e-6
SOFTPLUS_LIMIT = 20.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a batch, and what each sequence begins with.

    `starts`: for each sequence `s` (its slot holds a state), `z` (begins from zero, the slot is
    NaN) or `p` (a padding slot: nothing of it is used). Sequences beyond the text have a state.
    `decay`: bounds of log(-g) at a = 0; about -6 forgets nothing, 2 everything.
    """

    lens: tuple[int, ...]
    decode_sequences: int = 0
    starts: str = ""
    k_heads: int = 2
    ratio: int = 2
    k_dim: int = 64
    v_dim: int = 64
    first_slot: int = 1
    normalize: bool = True
    dtype: type = np.float16
    gate_dtype: type = np.float16
    state_dtype: type = np.float32
    decay: tuple[float, float] = (-6.0, 2.0)
    spread: float = 1.0
    flags: bool = True

    @property
    def v_heads(self) -> int:
        return self.k_heads * self.ratio

    @property
    def tokens(self) -> int:
        return sum(self.lens)

    def start_of(self, sequence: int) -> str:
        return self.starts[sequence] if sequence < len(self.starts) else "s"


def type_of(dtype: type) -> abi.Type:
    """The number of an element type."""
    return abi.Type.F16 if dtype is np.float16 else abi.Type.F32


class Slots:
    """Which slot each sequence has; the cache has slots more than are used."""

    def __init__(self, rng: np.random.Generator, shape: Shape) -> None:
        s = shape
        self.count = s.first_slot + len(s.lens) + 2
        free = s.first_slot + rng.permutation(self.count - s.first_slot)
        padding = (-1, s.first_slot - 1, self.count, self.count + 5)
        self.ids = free[: len(s.lens)].astype(np.int32)
        for sequence in range(len(s.lens)):
            if s.start_of(sequence) == "p":
                self.ids[sequence] = padding[sequence % len(padding)]
        self.query_start = np.cumsum((0, *s.lens)).astype(np.int32)
        self.has_initial_state = np.array(
            [s.start_of(i) != "z" for i in range(len(s.lens))], np.uint8
        )


class Batch:
    """The arrays of one batch. What a call must not use is NaN."""

    def __init__(self, rng: np.random.Generator, shape: Shape) -> None:
        self.shape = shape
        s = shape
        self.slots = Slots(rng, s)
        self.scale = float(np.float32(s.k_dim**-0.5))
        keys, values = s.k_heads * s.k_dim, s.v_heads * s.v_dim
        # q, k and v side by side as a projection gives them; two rows and 8 columns are unused.
        self.qkv = np.full((s.tokens + 2, 2 * keys + values + 8), np.nan, s.dtype)
        self.ba = np.full((s.tokens + 2, 2 * s.v_heads + 2), np.nan, s.gate_dtype)
        state = (s.v_heads, s.v_dim, s.k_dim)
        # Slots lie apart, as in a cache whose pages hold more.
        self.gap = 64
        self.state = np.full(
            (self.slots.count, int(np.prod(state)) + self.gap), np.nan, s.state_dtype
        )
        for sequence, rows in self.used():
            n = rows.stop - rows.start
            self.qkv[rows, :-8] = s.spread * rng.standard_normal((n, 2 * keys + values))
            if not s.normalize:  # longer keys than 1 would let the state grow without bound
                self.qkv[rows, : 2 * keys] *= s.k_dim**-0.5 / s.spread
            self.ba[rows, :-2] = rng.standard_normal((n, 2 * s.v_heads))
            if s.start_of(sequence) == "s":
                # A state of ordinary size: keys of length 1, values of size 1.
                drawn = rng.standard_normal(state) * s.spread * s.k_dim**-0.5
                self.state[self.slots.ids[sequence], : drawn.size] = drawn.reshape(-1)
        self.a_log = rng.uniform(*s.decay, s.v_heads).astype(np.float32)
        self.dt_bias = rng.uniform(-1, 1, s.v_heads).astype(s.gate_dtype)

    def used(self) -> list[tuple[int, slice]]:
        """Each sequence that counts, and its rows."""
        s, start = self.shape, self.slots.query_start
        return [
            (i, slice(int(start[i]), int(start[i + 1])))
            for i in range(len(s.lens))
            if s.start_of(i) != "p"
        ]

    def parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """FP64 q and k [tokens, k_heads, k_dim], v [tokens, v_heads, v_dim]."""
        s = self.shape
        keys = s.k_heads * s.k_dim
        wide = self.qkv[: s.tokens].astype(np.float64)
        q, k = (wide[:, i * keys :][:, :keys] for i in (0, 1))
        q, k = (x.reshape(s.tokens, s.k_heads, s.k_dim) for x in (q, k))
        return q, k, wide[:, 2 * keys : -8].reshape(s.tokens, s.v_heads, s.v_dim)

    def gates(self) -> tuple[np.ndarray, np.ndarray]:
        """FP64 decay and beta, [tokens, v_heads]."""
        s = self.shape
        wide = self.ba[: s.tokens].astype(np.float64)
        x = wide[:, s.v_heads : 2 * s.v_heads] + self.dt_bias.astype(np.float64)
        with np.errstate(over="ignore"):
            soft = np.where(x > SOFTPLUS_LIMIT, x, np.log1p(np.exp(x)))
            beta = 1 / (1 + np.exp(-wide[:, : s.v_heads]))
        return np.exp(-np.exp(self.a_log.astype(np.float64)) * soft), beta

    def state_of(self, slot: int, state: np.ndarray | None = None) -> np.ndarray:
        """[v_heads, v_dim, k_dim] of a slot."""
        s = self.shape
        cache = self.state if state is None else state
        return cache[slot, : -self.gap].reshape(s.v_heads, s.v_dim, s.k_dim)

    def right(self) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """FP64 out [tokens, v_heads, v_dim] and the states after it by sequence."""
        s = self.shape
        q, k, v = self.parts()
        if s.normalize:
            q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + NORM_EPS) for x in (q, k))
        q, k = (np.repeat(x, s.ratio, axis=1) for x in (q * self.scale, k))
        decay, beta = self.gates()
        out = np.full((s.tokens, s.v_heads, s.v_dim), UNTOUCHED)
        states = {}
        for sequence, rows in self.used():
            if s.start_of(sequence) == "s":
                state = self.state_of(self.slots.ids[sequence]).astype(np.float64)
            else:
                state = np.zeros((s.v_heads, s.v_dim, s.k_dim))
            for t in range(rows.start, rows.stop):
                state = state * decay[t][:, None, None]
                update = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", state, k[t]))
                state += update[:, :, None] * k[t][:, None, :]
                out[t] = np.einsum("hvk,hk->hv", state, q[t])
            if rows.stop > rows.start:
                states[sequence] = state
        return out, states


@dataclass(frozen=True)
class Placed:
    """A batch in device memory, ready to be called."""

    rig: Rig
    batch: Batch
    call: binding.Delta
    workspace: int
    workspace_bytes: int

    def run(self, *, stream: int = 0) -> None:
        binding.gated_delta(
            self.rig.library,
            self.call,
            workspace=self.workspace,
            workspace_bytes=self.workspace_bytes,
            stream=stream,
        )

    def result(self) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Out and the states by sequence, as `Batch.right`; all else must be as it was."""
        batch, s = self.batch, self.batch.shape
        width = s.v_heads * s.v_dim
        out = self.rig.get(int(self.call.out or 0), (s.tokens + 2, width + 8), s.dtype)
        assert (out[s.tokens :] == UNTOUCHED).all(), "wrote a row that belongs to no sequence"
        assert (out[:, width:] == UNTOUCHED).all(), "wrote past the last head"
        state = self.rig.get(int(self.call.state or 0), batch.state.shape, s.state_dtype)
        assert np.isnan(state[:, -batch.gap :]).all(), "wrote past the last head of a slot"
        used = {sequence for sequence, rows in batch.used() if rows.stop > rows.start}
        slots = {sequence: int(batch.slots.ids[sequence]) for sequence in used}
        for slot in set(range(batch.slots.count)) - set(slots.values()):
            same = np.array_equal(state[slot], batch.state[slot], equal_nan=True)
            assert same, f"wrote slot {slot}, which no sequence has"
        states = {sequence: batch.state_of(slot, state) for sequence, slot in slots.items()}
        return out[: s.tokens, :width].reshape(s.tokens, s.v_heads, s.v_dim), states


def place(rig: Rig, batch: Batch) -> Placed:
    """Put one batch into device memory; the workspace is NaN, it needs no initial value."""
    s = batch.shape
    keys, width = s.k_heads * s.k_dim, s.v_heads * s.v_dim
    size, gate_size = batch.qkv.itemsize, batch.ba.itemsize
    qkv, ba = rig.put(batch.qkv), rig.put(batch.ba)
    row, gate_row = batch.qkv.shape[1], batch.ba.shape[1]
    call = binding.Delta(
        io_type=type_of(s.dtype),
        gate_type=type_of(s.gate_dtype),
        a_log_type=abi.Type.F32,
        dt_bias_type=type_of(s.gate_dtype),
        state_type=type_of(s.state_dtype),
        normalize=int(s.normalize),
        scale=batch.scale,
        tokens=s.tokens + 2,
        sequences=len(s.lens),
        decode_sequences=s.decode_sequences,
        max_query_len=max(*s.lens, 1),
        k_heads=s.k_heads,
        v_heads=s.v_heads,
        k_dim=s.k_dim,
        v_dim=s.v_dim,
        q=qkv,
        q_stride=row,
        k=qkv + keys * size,
        k_stride=row,
        v=qkv + 2 * keys * size,
        v_stride=row,
        a=ba + s.v_heads * gate_size,
        a_stride=gate_row,
        b=ba,
        b_stride=gate_row,
        a_log=rig.put(batch.a_log),
        dt_bias=rig.put(batch.dt_bias),
        query_start=rig.put(batch.slots.query_start),
        slots=rig.put(batch.slots.ids),
        has_initial_state=rig.put(batch.slots.has_initial_state) if s.flags else None,
        first_slot=s.first_slot,
        slot_count=batch.slots.count,
        state=rig.put(batch.state),
        state_slot_stride=batch.state.shape[1],
        out=rig.put(np.full((s.tokens + 2, width + 8), UNTOUCHED, s.dtype)),
        out_stride=width + 8,
    )
    needed = binding.workspace_bytes(rig.library, call)
    workspace = rig.put(np.full(needed, 0xFF, np.uint8)) if needed else 0
    return Placed(rig, batch, call, workspace, needed)


def run(rig: Rig, batch: Batch) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Run one batch; out and states."""
    placed = place(rig, batch)
    placed.run()
    return placed.result()


def random_shape(rng: np.random.Generator, *, longest: int, base: Shape | None = None) -> Shape:
    """Draw lengths, starts, ratio and types; dimensions and element types are `base`'s."""
    base = base or Shape((1,))
    count = int(rng.integers(1, 6))
    decode = int(rng.integers(0, count + 1))
    lens = tuple(
        int(rng.integers(0, 2)) if i < decode else int(np.exp(rng.uniform(0, np.log(longest))))
        for i in range(count)
    )
    flags = bool(rng.random() < 0.8)
    starts = "".join(rng.choice(list("sszp" if flags else "sssp"), count))
    return replace(
        base,
        lens=lens,
        decode_sequences=decode,
        starts=starts,
        flags=flags,
        k_heads=int(rng.integers(1, 3)),
        ratio=int(rng.integers(1, 5)),
        first_slot=int(rng.integers(0, 2)),
        gate_dtype=np.float16 if rng.random() < 0.5 else np.float32,
        normalize=bool(rng.random() < 0.9),
    )


def split(whole: Batch, cut: int) -> tuple[Batch, Batch]:
    """Two batches that hold the tokens before and from `cut` of a single sequence."""
    parts = []
    for rows in (slice(0, cut), slice(cut, whole.shape.tokens)):
        shape = replace(whole.shape, lens=(rows.stop - rows.start,))
        part = Batch(np.random.default_rng(0), shape)
        part.slots.ids[:] = whole.slots.ids
        part.slots.count = whole.slots.count
        part.state = whole.state.copy()
        part.qkv[: shape.tokens], part.ba[: shape.tokens] = whole.qkv[rows], whole.ba[rows]
        part.a_log, part.dt_bias = whole.a_log, whole.dt_bias
        parts.append(part)
    return parts[0], parts[1]


def error_of(found: np.ndarray, right: np.ndarray) -> float:
    """The largest difference, each of its own right value and the root mean square of all."""
    if right.size == 0:
        return 0.0
    size = np.sqrt((right.astype(np.float64) ** 2).mean()) + np.abs(right)
    return float((np.abs(found.astype(np.float64) - right) / np.maximum(size, 1e-30)).max())
