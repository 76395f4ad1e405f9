"""Grouped products and routing plans against FP64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kernels_compare import TOLERANCE, error_of
from kernels_device import Device, Matrix, slice_rows
from kernels_matrix import kernel_of

from appliance.nvfp4 import abi

if TYPE_CHECKING:
    from kernels_report import Report

LARGEST_ACTIVATION = 3e4
"""Half of FP16's range, so that rounding x does not reach its end."""


@dataclass(frozen=True)
class Layer:
    """The experts of one layer: gate and up [2 * width, hidden], down [hidden, width]."""

    gate_up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]

    @property
    def width(self) -> int:
        return self.down[0].k

    @property
    def hidden(self) -> int:
        return self.down[0].n


def make_layer(device: Device, experts: int, width: int, hidden: int, **kind: Any) -> Layer:
    gate_up = device.matrix(experts * 2 * width, hidden, seed=11, **kind)
    down = device.matrix(experts * hidden, width, seed=12, **kind)
    return Layer(
        tuple(slice_rows(gate_up, e * 2 * width, (e + 1) * 2 * width) for e in range(experts)),
        tuple(slice_rows(down, e * hidden, (e + 1) * hidden) for e in range(experts)),
    )


def random_ids(device: Device, m: int, top_k: int, used: int) -> torch.Tensor:
    """int32 [m, top_k], the experts of a token differ."""
    keys = torch.rand(m, used, generator=device.generator(m, top_k, used), device=device.name)
    return keys.argsort(dim=1)[:, :top_k].int().contiguous()


def right_gate_up(layer: Layer, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """FP64 [pairs, width]; zero for pairs that no expert computes."""
    flat, width = ids.flatten().long(), layer.width
    right = torch.zeros(flat.numel(), width, dtype=torch.float64, device=x.device)
    for expert in flat.unique().tolist():
        if 0 <= expert < len(layer.gate_up):
            pairs = (flat == expert).nonzero().flatten()
            z = x[pairs // ids.shape[1]].double() @ layer.gate_up[expert].values().T
            right[pairs] = torch.nn.functional.silu(z[:, :width]) * z[:, width:]
    return right


def right_down(
    layer: Layer, ids: torch.Tensor, weights: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """FP64 [m, hidden]."""
    m, top_k = ids.shape
    flat = ids.flatten().long()
    each = torch.zeros(flat.numel(), layer.hidden, dtype=torch.float64, device=x.device)
    for expert in flat.unique().tolist():
        if 0 <= expert < len(layer.down):
            pairs = (flat == expert).nonzero().flatten()
            each[pairs] = x[pairs].double() @ layer.down[expert].values().T
    return (each.view(m, top_k, -1) * weights.double()[..., None]).sum(1)


@dataclass(frozen=True)
class Case:
    name: str
    ids: torch.Tensor
    expert_map: torch.Tensor | None = None

    def local(self, experts: int) -> torch.Tensor:
        """Local experts, -1 for what nobody computes."""
        ids = self.ids.long()
        if self.expert_map is None:
            return torch.where((ids >= 0) & (ids < experts), ids, -1)
        known = (ids >= 0) & (ids < self.expert_map.numel())
        mapped = self.expert_map.long()[ids.clamp(0, self.expert_map.numel() - 1)]
        return torch.where(known & (mapped >= 0) & (mapped < experts), mapped, -1)


def _cases(device: Device, experts: int, top_k: int, ms: tuple[int, ...]) -> list[Case]:
    last = experts - 1
    cases = [Case(f"M={m}", random_ids(device, m, top_k, experts)) for m in ms]
    for m in (ms[0], ms[-1]):
        some = max(top_k, experts // 2)
        cases.append(Case(f"M={m}, empty experts", random_ids(device, m, top_k, some)))
        one = torch.full((m, 1), last, dtype=torch.int32, device=device.name)
        cases.append(Case(f"M={m}, all on one expert", one))
        skipped = random_ids(device, m, top_k, experts)
        skipped.flatten()[::3] = -1
        skipped.flatten()[1::5] = experts + 7
        cases.append(Case(f"M={m}, foreign experts", skipped))
        nobody = torch.full((m, top_k), -1, dtype=torch.int32, device=device.name)
        cases.append(Case(f"M={m}, nobody's", nobody))
        wide = torch.arange(2 * experts, dtype=torch.int32, device=device.name)
        renamed = torch.where(wide % 2 == 0, last - wide // 2, -1).int()
        global_ids = random_ids(device, m, top_k, 2 * experts)
        cases.append(Case(f"M={m}, mapped", global_ids, renamed))
    return cases


def run_moe(device: Device, report: Report, *, quick: bool) -> None:
    """Layers of small odd sizes, of real models, and of each kind of scale."""
    layers: list[tuple[int, int, int, int, tuple[int, ...], dict[str, Any]]] = [
        (6, 48, 80, 2, (1, 9, 30, 90), {}),
        (5, 128, 256, 2, (3, 45), {"group": 128, "scale_dtype": torch.float16}),
    ]
    if not quick:
        layers += [
            (6, 48, 1040, 2, (1, 9, 30, 90, 150), {}),
            (128, 768, 2048, 8, (1, 8, 32, 100, 257), {}),
            (32, 384, 2880, 4, (1, 16, 64, 300), {"is_divisor": True}),
            (8, 1408, 2048, 2, (1, 7, 64, 512), {}),
        ]
        layers += [
            (7, 256, 384, 2, (3, 25, 45, 80), {"group": group, "scale_dtype": dtype})
            for group, dtype in (
                *((32, torch.uint8), (64, torch.uint8), (128, torch.uint8)),
                *((64, torch.float16), (64, torch.float32), (128, torch.float32)),
            )
        ]
    kernels: dict[str, int] = {}
    worst = 0.0
    for experts, width, hidden, top_k, ms, kind in layers:
        layer = make_layer(device, experts, width, hidden, **kind)
        gate_up = device.pack(*layer.gate_up, kind=abi.WeightKind.GATE_UP)
        down = device.pack(*layer.down)
        for case in _cases(device, experts, top_k, ms):
            where = f"{experts} experts {width}x{hidden} {kind or ''} {case.name}"
            kernel = kernel_of(device, gate_up, *case.ids.shape)
            kernels[kernel] = kernels.get(kernel, 0) + 1
            with report.case(where):
                worst = max(worst, _check(device, layer, (gate_up, down), case))
    report.details.update(kernels=kernels, worst=worst)


def _check(device: Device, layer: Layer, packed: tuple[Any, Any], case: Case) -> float:
    """Both products of one routing; returns the larger error."""
    experts, (m, top_k) = len(layer.gate_up), case.ids.shape
    local = case.local(experts)
    routing = device.route(case.ids, experts, case.expert_map)
    x = device.tokens(m, layer.hidden, pad=8)
    # silu(gate) * up grows with the square of x; the output is FP16 and must hold the largest.
    largest = float(right_gate_up(layer, local, x).abs().max())
    x.mul_(min(1.0, math.sqrt(LARGEST_ACTIVATION / max(largest, 1.0))))
    middle = device.tokens(m * top_k, layer.width, seed=1)
    source = device.generator(m, top_k, experts, 5)
    weights = torch.rand(m, top_k, generator=source, device=device.name) + 0.1

    activated = device.gate_up(packed[0], routing, x)
    summed = device.down(packed[1], routing, weights, middle)

    skipped = local.flatten() < 0
    assert not bool(activated[skipped].any()), "gate_up of a skipped pair is not zero"
    worst = 0.0
    for name, found, right in (
        ("gate_up", activated, right_gate_up(layer, local, x)),
        ("down", summed, right_down(layer, local, weights, middle)),
    ):
        # silu(gate) * up has no one size of its terms: the row's largest stands for it.
        size = right.abs().amax(dim=1, keepdim=True)
        error = error_of(found, right, size)
        assert error.worst <= TOLERANCE, (
            f"{name}: norm {error.norm:.2e}, element {error.element:.2e} at {list(error.at)}"
        )
        worst = max(worst, error.worst)
    return worst
