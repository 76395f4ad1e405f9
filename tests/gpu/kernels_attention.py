"""Attention over random paged batches against FP64 on the device, and in captured graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from attention_problem import Batch, Shape, place, random_shape
from kernels_cases import TorchMemory
from sm70_rig import Rig

if TYPE_CHECKING:
    from attention_problem import Placed
    from kernels_device import Device
    from kernels_report import Report

TOLERANCE = 1e-3
"""Of the largest value: weights and results are rounded to FP16, 4.9e-4 each."""

HEAD_DIMS = (64, 128, 256)


def right_on(device: str, batch: Batch) -> torch.Tensor:
    """FP64 [tokens, q_heads, head_dim], made on a device from the canonical keys and values."""
    s = batch.shape
    width = s.q_heads * s.head_dim
    query = torch.from_numpy(batch.query[: s.tokens, :width].copy()).to(device).double()
    query = query.view(s.tokens, s.kv_heads, -1, s.head_dim)
    out = torch.zeros_like(query)
    for sequence, (count, length) in enumerate(zip(s.query_lens, s.seq_lens, strict=True)):
        rows = slice(int(batch.query_start[sequence]), int(batch.query_start[sequence]) + count)
        keys, values = (
            torch.from_numpy(each[sequence]).to(device).double()
            for each in (batch.keys, batch.values)
        )
        scores = torch.einsum("ihrd,jhd->hrij", query[rows], keys) * batch.scale
        last = torch.arange(length - count, length, device=device)[:, None]
        key = torch.arange(length, device=device)
        hidden = (key > last) | (key <= last - (s.window or length + 1))
        weights = torch.softmax(scores.masked_fill_(hidden, -torch.inf), dim=-1)
        out[rows] = torch.einsum("hrij,jhd->ihrd", weights, values)
    return out.view(s.tokens, s.q_heads, s.head_dim)


def run_attention(device: Device, report: Report, *, quick: bool) -> None:
    """Lengths 1 to 33,000, ratios 1 to 16, every head size, windows, drafted tokens, layouts."""
    rng = np.random.default_rng(2026)
    worst = 0.0
    for index in range(9 if quick else 90):
        base = Shape((1,), (1,), head_dim=HEAD_DIMS[index % 3])
        batch = Batch(rng, random_shape(rng, longest=200 if quick else 33000, base=base))
        with report.case(str(batch.shape)):
            rig = Rig(device.library, TorchMemory(device.name))
            placed = place(rig, batch)
            placed.run(stream=device.stream())
            found, right = placed.result(), right_on(device.name, batch).cpu().numpy()
            assert np.isfinite(found).all(), "not finite"
            error = float(np.abs(found - right).max() / np.abs(right).max())
            worst = max(worst, error)
            assert error <= TOLERANCE, f"error {error:.2e}"
            placed.run(stream=device.stream())
            assert np.array_equal(placed.result(), found), "other bits in a second call"
            rig.release()
    report.details.update(worst=worst, quick=quick)


def run_attention_graphs(device: Device, report: Report, *, quick: bool) -> None:
    """A decode call captured with a bound above all lengths follows them from replay to replay."""
    for head_dim in HEAD_DIMS:
        shape = Shape(
            (1,) * 4,
            (900, 64, 1, 333),
            q_heads=8,
            head_dim=head_dim,
            decode_sequences=4,
            max_seq_len=32768,
        )
        with report.case(f"head size {head_dim}"):
            rig = Rig(device.library, TorchMemory(device.name))
            placed = place(rig, Batch(np.random.default_rng(5), shape))
            _replay(rig, placed, turns=2 if quick else 5)
            rig.release()


def _replay(rig: Rig, placed: Placed, *, turns: int) -> None:
    """Capture once; eager calls with each of the lengths are what the replays have to give."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        placed.run(stream=side.cuda_stream)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        placed.run(stream=torch.cuda.current_stream().cuda_stream)
    lengths = np.array(placed.batch.shape.seq_lens, np.int32)
    for turn in range(turns):
        rig.memory.write(int(placed.call.seq_lens or 0), np.maximum(lengths - 17 * turn, 1))
        placed.run(stream=torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        eager = placed.result().copy()
        graph.replay()
        torch.cuda.synchronize()
        assert np.array_equal(placed.result(), eager), f"replay {turn} has other bits"
