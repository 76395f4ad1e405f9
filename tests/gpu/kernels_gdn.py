"""The gated delta rule over random batches against FP64 on the device, and in captured graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from gdn_problem import NORM_EPS, Batch, Shape, error_of, place, random_shape
from kernels_cases import TorchMemory
from sm70_gdn_cases import CHUNK_BOUND
from sm70_rig import Rig

if TYPE_CHECKING:
    from gdn_problem import Placed
    from kernels_device import Device
    from kernels_report import Report

SIZES = ((128, 128), (64, 64), (128, 64), (64, 128))


def right_on(device: str, batch: Batch) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """FP64 out and states as `Batch.right`, computed on a device."""
    s = batch.shape
    q, k, v = (torch.from_numpy(each).to(device) for each in batch.parts())
    if s.normalize:
        q, k = (x / (x.square().sum(-1, keepdim=True) + NORM_EPS).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(s.ratio, 1) for x in (q * batch.scale, k))
    decay, beta = (torch.from_numpy(each).to(device) for each in batch.gates())
    out = torch.zeros_like(v)
    states = {}
    for sequence, rows in batch.used():
        if rows.stop == rows.start:
            continue
        state = torch.zeros((s.v_heads, s.v_dim, s.k_dim), dtype=torch.float64, device=device)
        if s.start_of(sequence) == "s":
            held = batch.state_of(batch.slots.ids[sequence]).astype(np.float64)
            state = torch.from_numpy(held).to(device)
        for t in range(rows.start, rows.stop):
            state = state * decay[t][:, None, None]
            update = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
            state += update[:, :, None] * k[t][:, None, :]
            out[t] = torch.einsum("hvk,hk->hv", state, q[t])
        states[sequence] = state.cpu().numpy()
    return out.cpu().numpy(), states


def run_gdn(device: Device, report: Report, *, quick: bool) -> None:
    """Lengths 1 to 2000, decode and prompts in one call, ratios 1 to 4, every size of a head."""
    rng = np.random.default_rng(2027)
    worst = {"out": 0.0, "state": 0.0}
    for index in range(4 if quick else 32):
        k_dim, v_dim = SIZES[index % len(SIZES)]
        base = Shape((1,), k_dim=k_dim, v_dim=v_dim)
        batch = Batch(rng, random_shape(rng, longest=90 if quick else 2000, base=base))
        with report.case(str(batch.shape)):
            rig = Rig(device.library, TorchMemory(device.name))
            placed = place(rig, batch)
            placed.run(stream=device.stream())
            found, states = placed.result()
            right, right_states = right_on(device.name, batch)
            assert np.isfinite(found).all(), "not finite"
            for sequence, rows in batch.used():
                if sequence in right_states:
                    errors = {
                        "out": error_of(found[rows], right[rows]),
                        "state": error_of(states[sequence], right_states[sequence]),
                    }
                    worst = {name: max(worst[name], errors[name]) for name in worst}
                    assert max(errors.values()) <= CHUNK_BOUND, f"{sequence}: {errors}"
            rig.release()
    report.details.update(worst=worst, quick=quick)


def run_gdn_graphs(device: Device, report: Report, *, quick: bool) -> None:
    """A captured call follows slots and lengths from replay to replay."""
    shapes = {
        "decode": Shape((1,) * 6, 6, "sszsss", k_dim=128, v_dim=128),
        "chunks": Shape((1, 300, 80), 1, "szs", k_dim=128, v_dim=128),
    }
    for name, shape in shapes.items():
        with report.case(name):
            rig = Rig(device.library, TorchMemory(device.name))
            batch = Batch(np.random.default_rng(6), shape)
            _replay(rig, place(rig, batch), turns=2 if quick else 5)
            rig.release()


def _replay(rig: Rig, placed: Placed, *, turns: int) -> None:
    """Capture once; eager calls with each batch of slots are what the replays have to give."""
    state, slots = placed.batch.state, placed.batch.slots.ids
    out_shape = (placed.call.tokens, placed.call.v_heads * placed.call.v_dim + 8)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        placed.run(stream=side.cuda_stream)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        placed.run(stream=torch.cuda.current_stream().cuda_stream)
    for turn in range(turns):
        used = np.roll(slots, turn)
        results = []
        for again in (False, True):
            rig.memory.write(int(placed.call.state or 0), np.nan_to_num(state))
            rig.memory.write(int(placed.call.slots or 0), used)
            if again:
                graph.replay()
            else:
                placed.run(stream=torch.cuda.current_stream().cuda_stream)
            torch.cuda.synchronize()
            results.append(rig.get(int(placed.call.out or 0), out_shape, np.float16))
            results.append(rig.get(int(placed.call.state or 0), state.shape, np.float32))
        assert results[0].tobytes() == results[2].tobytes(), f"replay {turn}: other bits of out"
        assert results[1].tobytes() == results[3].tobytes(), f"replay {turn}: other states"
