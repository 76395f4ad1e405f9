"""Gated delta networks on a GPU against the same operations on host memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from appliance.vllm_plugin import gdn_ops

SLOTS, WIDTH = 40, 4
CPU = torch.device("cpu")
BATCHES = {
    "decode": [1] * 16,
    "prompt of one token": [1],
    "mixed": [1, 1, 1, 200, 64, 65, 3],
    "prompt": [2100],
}
HEADS = [(2, 6, 64), (16, 48, 128), (8, 8, 128), (4, 16, 64)]
"""Key heads, value heads, and the elements of both."""


@dataclass(frozen=True)
class Layer:
    """What one layer computes with, on one device; projections give the first two."""

    qkvz: torch.Tensor
    ba: torch.Tensor
    weight: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    conv_state: torch.Tensor
    state: torch.Tensor
    key_heads: int

    def on(self, device: torch.device) -> Layer:
        """Copies of everything on a device."""
        tensors = {name: t for name, t in vars(self).items() if isinstance(t, torch.Tensor)}
        return replace(self, **{name: t.to(device, copy=True) for name, t in tensors.items()})

    def run(self, step: gdn_ops.Batch) -> torch.Tensor:
        """Convolution, gated delta rule and gated norm, as the layer calls them."""
        channels, values = self.conv_state.shape[-1], self.state.shape[1]
        x, z = self.qkvz[:, :channels], self.qkvz[:, channels:]
        past, gates = self.conv_state.transpose(-1, -2), (self.ba[:, values:], self.ba[:, :values])
        mixed = gdn_ops.convolve(x, self.weight, past, step, silu=True)
        rates = (self.a_log, self.dt_bias)
        computed = gdn_ops.recur(mixed, gates, rates, self.state, step, key_heads=self.key_heads)
        return gdn_ops.gated_norm(computed, z.view(computed.shape), self.norm, 1e-6, sigmoid=False)


def layer(tokens: int, heads: tuple[int, int, int]) -> Layer:
    """Random inputs of FP16 and states."""
    keys, values, size = heads
    channels = (2 * keys + values) * size
    numbers = torch.Generator().manual_seed(tokens + channels)

    def made(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers) * scale

    return Layer(
        qkvz=made(tokens, channels + values * size).half(),
        ba=made(tokens, 2 * values).half(),
        weight=made(channels, WIDTH, scale=0.5).half(),
        a_log=made(values) - 1,
        dt_bias=made(values).half(),
        norm=made(size).half(),
        conv_state=made(SLOTS, WIDTH - 1, channels).half(),
        state=made(SLOTS, values, size, size, scale=0.3),
        key_heads=keys,
    )


def batch(counts: list[int], device: torch.device, padding: int = 0) -> gdn_ops.Batch:
    """Sequences at scattered slots, every third of them new, padded ones behind them."""
    decodes = next((at for at, count in enumerate(counts) if count > 1), len(counts))
    places = [1 + at * 7 % (SLOTS - 1) for at in range(len(counts))] + [0] * padding
    return gdn_ops.Batch(
        decodes=decodes + (padding if decodes == len(counts) else 0),
        longest=max(counts),
        query_start=torch.tensor([0, *counts, *[0] * padding]).cumsum(0).int().to(device),
        slots=torch.tensor(places).int().to(device),
        carried=torch.tensor([at % 3 > 0 for at in range(len(places))]).to(device),
    )


def far(found: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference, in units of the largest value."""
    right = right.double()
    return float((found.cpu().double() - right).abs().max() / right.abs().max().clamp(min=1e-6))


def replayed(made: Layer, counts: list[int]) -> tuple[torch.Tensor, Layer]:
    """Capture a padded step whose sequences are all padding, then replay it with the real ones."""
    own, real = made.on(torch.device("cuda")), batch(counts, torch.device("cuda"), padding=2)
    step = replace(real, slots=torch.zeros_like(real.slots), carried=real.carried.clone())
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        own.run(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = own.run(step)
    step.slots.copy_(real.slots)
    graph.replay()
    torch.cuda.synchronize()
    return out.clone(), own


def check() -> dict[str, float]:
    """Largest differences of results and of both states, by case; replays give the same bits."""
    worst = {}
    for heads in HEADS:
        for name, counts in BATCHES.items():
            made = layer(sum(counts) + (2 if name == "decode" else 0), heads)
            host, gpu = made.on(CPU), made.on(torch.device("cuda"))
            right, found = (
                each.run(batch(counts, each.ba.device))[: sum(counts)] for each in (host, gpu)
            )
            label = f"{name}, {heads[0]}/{heads[1]} heads of {heads[2]}"
            worst[label] = far(found, right)
            worst[f"state of {label}"] = far(gpu.state, host.state)
            worst[f"inputs kept of {label}"] = far(gpu.conv_state, host.conv_state)
            if name == "decode":
                again, own = replayed(made, counts)
                assert torch.equal(again[: sum(counts)], found), f"replay of {label}"
                assert torch.equal(own.state, gpu.state), f"state after a replay of {label}"
    return worst
