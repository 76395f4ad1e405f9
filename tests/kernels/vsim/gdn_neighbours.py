"""The convolution before the gated delta rule and the norm behind it: data and FP64 results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from gdn_problem import UNTOUCHED, Shape, Slots, type_of

from appliance.nvfp4 import gdn as binding

if TYPE_CHECKING:
    from sm70_rig import Rig


class Convolution:
    """A batch of sequences; only `lens`, starts, slots and element types of the shape count."""

    def __init__(
        self,
        rng: np.random.Generator,
        shape: Shape,
        *,
        width: int = 4,
        channels: int = 72,
        weight_dtype: type = np.float16,
        is_time_inner: bool = True,
        silu: bool = True,
        bias: bool = True,
    ) -> None:
        self.shape, self.width, self.channels = shape, width, channels
        self.is_time_inner, self.silu = is_time_inner, silu
        s = shape
        self.slots = Slots(rng, s)
        self.x = np.full((s.tokens + 2, channels + 8), np.nan, s.dtype)
        # A time more than is used, as a cache that drafted tokens made wider.
        self.state = np.full((self.slots.count, channels + 3, width), np.nan, s.state_dtype)
        self.weight = rng.standard_normal((channels, width)).astype(weight_dtype)
        self.bias = rng.standard_normal(channels).astype(weight_dtype) if bias else None
        start = self.slots.query_start
        self.rows = {
            i: slice(int(start[i]), int(start[i + 1]))
            for i in range(len(s.lens))
            if s.start_of(i) != "p"
        }
        for sequence, rows in self.rows.items():
            self.x[rows, :channels] = rng.standard_normal((rows.stop - rows.start, channels))
            if s.start_of(sequence) == "s":
                history = rng.standard_normal((channels, width - 1))
                self.state[self.slots.ids[sequence], :channels, : width - 1] = history

    def right(self) -> tuple[np.ndarray, np.ndarray]:
        """FP64 y [tokens, channels], and the whole state after it."""
        s, history = self.shape, self.width - 1
        y = np.full((s.tokens, self.channels), UNTOUCHED)
        state = self.state.astype(np.float64)
        for sequence, rows in self.rows.items():
            if rows.stop == rows.start:
                continue
            place = state[self.slots.ids[sequence], : self.channels]
            is_new = s.start_of(sequence) == "z"
            before = np.zeros((history, self.channels)) if is_new else place[:, :history].T
            seen = np.concatenate([before, self.x[rows, : self.channels].astype(np.float64)])
            count = rows.stop - rows.start
            sums = sum(seen[j : j + count] * self.weight[:, j] for j in range(self.width))
            sums = sums + (0 if self.bias is None else self.bias.astype(np.float64))
            y[rows] = sums / (1 + np.exp(-sums)) if self.silu else sums
            place[:, :history] = seen[count:].T
        return y, state

    def run(self, rig: Rig) -> tuple[np.ndarray, np.ndarray]:
        """Y [tokens, channels], and the whole state after it; rows beyond must be as they were."""
        s = self.shape
        order = (0, 1, 2) if self.is_time_inner else (0, 2, 1)
        cache = np.ascontiguousarray(self.state.transpose(order))
        inner = cache.shape[2]
        channel, time = (inner, 1) if self.is_time_inner else (1, inner)
        row = self.channels + 8
        y = rig.put(np.full((s.tokens + 2, row), UNTOUCHED, s.dtype))
        state = rig.put(cache)
        call = binding.Conv(
            io_type=type_of(s.dtype),
            state_type=type_of(s.state_dtype),
            weight_type=type_of(self.weight.dtype.type),
            width=self.width,
            silu=int(self.silu),
            tokens=s.tokens + 2,
            sequences=len(s.lens),
            decode_sequences=s.decode_sequences,
            channels=self.channels,
            x=rig.put(self.x),
            x_stride=row,
            y=y,
            y_stride=row,
            weight=rig.put(self.weight),
            bias=None if self.bias is None else rig.put(self.bias),
            query_start=rig.put(self.slots.query_start),
            slots=rig.put(self.slots.ids),
            has_initial_state=rig.put(self.slots.has_initial_state) if s.flags else None,
            first_slot=s.first_slot,
            slot_count=self.slots.count,
            state=state,
            state_slot_stride=cache.shape[1] * inner,
            state_channel_stride=channel,
            state_time_stride=time,
        )
        binding.causal_conv(rig.library, call)
        found = rig.get(y, (s.tokens + 2, row), s.dtype)
        assert (found[s.tokens :] == UNTOUCHED).all(), "wrote a row that belongs to no sequence"
        assert (found[:, self.channels :] == UNTOUCHED).all(), "wrote past the last channel"
        after = rig.get(state, cache.shape, s.state_dtype).transpose(order)
        return found[: s.tokens, : self.channels], after


def gated_norm(
    rig: Rig,
    rng: np.random.Generator,
    sizes: tuple[int, int, int],
    *,
    gate: binding.Gate = binding.Gate.SILU,
    dtype: type = np.float16,
    weight_dtype: type = np.float32,
) -> tuple[np.ndarray, np.ndarray]:
    """Result and FP64 result of a norm of [tokens, heads, hidden]; z lies inside of wider rows."""
    tokens, heads, hidden = sizes
    width = heads * hidden
    x = (3 * rng.standard_normal((tokens, width))).astype(dtype)
    z = np.full((tokens, 2 * width + 8), np.nan, dtype)
    z[:, width : 2 * width] = 2 * rng.standard_normal((tokens, width))
    weight = rng.standard_normal(hidden).astype(weight_dtype)
    y = rig.put(np.full((tokens, width + 8), UNTOUCHED, dtype))
    call = binding.GateNorm(
        io_type=type_of(dtype),
        weight_type=type_of(weight_dtype),
        gate=gate,
        eps=1e-6,
        tokens=tokens,
        heads=heads,
        hidden=hidden,
        weight=rig.put(weight),
        x=rig.put(x),
        x_stride=width,
        z=rig.put(z) + width * z.itemsize,
        z_stride=z.shape[1],
        y=y,
        y_stride=width + 8,
    )
    binding.gated_rms_norm(rig.library, call)
    found = rig.get(y, (tokens, width + 8), dtype)
    assert (found[:, width:] == UNTOUCHED).all(), "wrote past the last head"
    wide = x.astype(np.float64).reshape(sizes)
    open_ = 1 / (1 + np.exp(-z[:, width : 2 * width].astype(np.float64).reshape(sizes)))
    if gate == binding.Gate.SILU:
        open_ = open_ * z[:, width : 2 * width].astype(np.float64).reshape(sizes)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    return found[:, :width].reshape(sizes), normed * weight.astype(np.float64) * open_
