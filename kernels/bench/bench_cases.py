"""What the benches time: calls of the library with real data, each with the proof of its result.

The same cases run on the modelled V100 (bench_vsim.py) and on a GPU (bench_gpu.py). A case is named
`matmul:MxNxK`, `dequantize:NxK`, or `moe:M[xEXPERTSxTOP_KxWIDTHxHIDDEN]`.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sm70_rig import E2M1, E4M3, Matrix, Packed, Rig, random_matrix

from appliance.nvfp4 import abi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DENSE = ((17408, 5120), (5120, 8704))
DEFAULT = (
    *(f"matmul:{m}x{n}x{k}" for n, k in DENSE for m in (1, 8, 16, 32)),
    "matmul:256x17408x5120",
    "dequantize:4096x4096",
    *(f"moe:{m}" for m in (1, 8, 32)),
)
MOE = (128, 8, 768, 2048)  # experts, top-k, width, hidden
TOLERANCE = 1e-3
"""Of the largest value: FP16 rounds to 4.9e-4, FP32 sums and FP16 activations leave the rest."""
DISTINCT_EXPERTS = 4
WEIGHT_BYTES, HALF_BYTES = 0.5625, 2


@dataclass(frozen=True)
class Call:
    """One call that is timed.

    Attributes:
        name: The entry of the ABI, without its prefix.
        run: Enqueues the call.
        error: The largest deviation of what the call wrote, relative to the largest right value.
        tolerance: The most that `error` may be.
        weight_bytes: Packed weights that the call has to read; experts nobody is routed to left
            out.
        moved_bytes: All that it has to read and write.
        flops: Of the products.
    """

    name: str
    run: Callable[[], None]
    error: Callable[[], float]
    tolerance: float
    weight_bytes: int
    moved_bytes: int
    flops: int

    def proved(self, case: str) -> dict[str, Any]:
        """Run, and give what a report says of the call besides its time.

        Raises:
            ArithmeticError: If what it wrote is wrong: it must not be timed.
        """
        self.run()
        error = self.error()
        if not error <= self.tolerance:
            raise ArithmeticError(f"{case} {self.name}: error {error:.2e}, not timed")
        return {
            "call": self.name,
            "error": float(f"{error:.2e}"),
            "weight_bytes": self.weight_bytes,
            "moved_bytes": self.moved_bytes,
            "flops": self.flops,
        }


def calls_of(rig: Rig, case: str) -> Iterator[Call]:
    """Make the data of a case and give its calls in order; each needs the ones before it."""
    kind, _, sizes = case.partition(":")
    numbers = tuple(map(int, sizes.split("x")))
    if kind == "matmul":
        yield _matmul(rig, *numbers)
    elif kind == "dequantize":
        yield _dequantize(rig, *numbers)
    elif kind == "moe":
        yield from _moe(rig, numbers[0], *(numbers[1:] or MOE))
    else:
        raise ValueError(f"matmul, dequantize or moe, got {case}")


def values_of(matrix: Matrix) -> np.ndarray:
    """FP32 [N, K], nearest to the exact values; FP64 of a large matrix would take gigabytes."""
    n, k = matrix.shape
    values = np.empty((n, k), np.float32)
    table = E2M1.astype(np.float32)
    values[:, 0::2] = table[matrix.codes & 15]
    values[:, 1::2] = table[matrix.codes >> 4]
    scales = E4M3.astype(np.float32)[matrix.scales] * matrix.row_globals[:, None]
    blocks = values.reshape(n, matrix.scales.shape[1], -1)
    blocks *= scales[:, :, None]
    return values


def error_of(found: np.ndarray, right: np.ndarray) -> float:
    """The largest difference over the largest right value; infinite where a value is not finite."""
    if not np.isfinite(found).all():
        return float("inf")
    largest = max(float(np.abs(right).max()), 1e-30)
    return float(np.abs(found.astype(np.float32) - right).max()) / largest


@functools.cache
def _dense(n: int, k: int) -> tuple[Matrix, np.ndarray]:
    """A matrix and its values; cases that differ in M share it."""
    matrix = random_matrix(np.random.default_rng(n + k), n, k)
    return matrix, values_of(matrix)


def _matmul(rig: Rig, m: int, n: int, k: int) -> Call:
    matrix, values = _dense(n, k)
    tokens = np.random.default_rng(m).normal(size=(m, k)).astype(np.float16)
    weight = rig.pack(matrix)
    needed = rig.library.matmul_workspace_bytes(weight.handle, m)
    x, y = rig.put(tokens), rig.put(np.full((m, n), np.nan, np.float16))
    workspace = rig.room(needed) if needed else 0

    def run() -> None:
        rig.library.matmul(
            weight.handle,
            m,
            io_type=abi.Type.F16,
            x=x,
            x_stride=k,
            y=y,
            y_stride=n,
            workspace=workspace,
            workspace_bytes=needed,
        )

    def error() -> float:
        right = tokens.astype(np.float32) @ values.T
        return error_of(rig.get(y, (m, n), np.float16), right)

    weights = int(n * k * WEIGHT_BYTES)
    moved = weights + HALF_BYTES * m * (n + k)
    return Call("matmul", run, error, TOLERANCE, weights, moved, 2 * m * n * k)


def _dequantize(rig: Rig, n: int, k: int) -> Call:
    matrix = random_matrix(np.random.default_rng(n + k), n, k)
    weight = rig.pack(matrix)
    out = rig.put(np.full((n, k), np.nan, np.float16))

    def run() -> None:
        rig.library.dequantize(weight.handle, out, out_type=abi.Type.F16, out_stride=k, rows=n)

    def error() -> float:
        rows = matrix.row_globals.astype(np.float64)[:, None]
        right = (matrix.unscaled() * rows).astype(np.float32).astype(np.float16)
        return error_of(rig.get(out, (n, k), np.float16), right.astype(np.float32))

    weights = int(n * k * WEIGHT_BYTES)
    return Call("dequantize", run, error, 0.0, weights, weights + HALF_BYTES * n * k, 0)


def routing(m: int, experts: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Uniform routing: int32 ids [M, top_k], distinct in a row, and FP32 weights."""
    rng = np.random.default_rng(m * 1009 + experts)
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(m)]).astype(np.int32)
    return ids, rng.uniform(0.1, 1, (m, top_k)).astype(np.float32)


def _moe(rig: Rig, m: int, experts: int, top_k: int, width: int, hidden: int) -> Iterator[Call]:
    """The plan, the gate/up product of `2 * width x hidden`, the down product."""
    rng = np.random.default_rng(m)
    ids, topk_weights = routing(m, experts, top_k)
    used = np.unique(ids)
    gate_up, gate_up_values = _experts(rig, rng, experts, 2 * width, hidden, abi.WeightKind.GATE_UP)
    down, down_values = _experts(rig, rng, experts, hidden, width, abi.WeightKind.LINEAR)
    tokens = rng.normal(size=(m, hidden)).astype(np.float16)
    middle = rng.normal(size=(m * top_k, width)).astype(np.float16)
    pairs = ids.reshape(-1)

    plan_bytes = rig.library.moe_plan_bytes(m, top_k, experts)
    plan, on_device_ids = rig.put(np.full(plan_bytes, 0xEE, np.uint8)), rig.put(ids)
    x, activated = rig.put(tokens), rig.put(np.full((m * top_k, width), np.nan, np.float16))
    down_x, y = rig.put(middle), rig.put(np.full((m, hidden), np.nan, np.float16))
    needed = rig.library.moe_workspace_bytes(gate_up.handle, down.handle, m, top_k)
    weights = rig.put(topk_weights)
    common = {
        "top_k": top_k,
        "plan": plan,
        "plan_bytes": plan_bytes,
        "io_type": abi.Type.F16,
        "workspace": rig.room(max(needed, 1)),
        "workspace_bytes": needed,
    }

    def make_plan() -> None:
        rig.library.moe_plan(
            on_device_ids, m, top_k=top_k, experts=experts, plan=plan, plan_bytes=plan_bytes
        )

    def run_gate_up() -> None:
        rig.library.moe_gate_up(
            gate_up.handle,
            m,
            **common,
            x=x,
            x_stride=hidden,
            y=activated,
            y_stride=width,
        )

    def run_down() -> None:
        rig.library.moe_down(
            down.handle,
            m,
            **common,
            x=down_x,
            x_stride=width,
            topk_weights=weights,
            y=y,
            y_stride=hidden,
        )

    def gate_up_error() -> float:
        z = _pair_products(gate_up_values, pairs, tokens[np.arange(m * top_k) // top_k])
        right = z[:, :width] / (1 + np.exp(-z[:, :width])) * z[:, width:]
        return error_of(rig.get(activated, right.shape, np.float16), right)

    def down_error() -> float:
        each = _pair_products(down_values, pairs, middle) * topk_weights.reshape(-1, 1)
        right = each.reshape(m, top_k, hidden).sum(axis=1)
        return error_of(rig.get(y, right.shape, np.float16), right)

    # The plan is opaque: the products that follow are the proof of it.
    yield Call("moe_plan", make_plan, lambda: 0.0, 0.0, 0, 4 * m * top_k, 0)
    size = int(2 * width * hidden * WEIGHT_BYTES) * len(used)
    moved = size + HALF_BYTES * m * (hidden + top_k * width)
    flops = 4 * m * top_k * width * hidden
    yield Call("moe_gate_up", run_gate_up, gate_up_error, TOLERANCE, size, moved, flops)
    size, moved = size // 2, size // 2 + HALF_BYTES * m * (hidden + top_k * width)
    yield Call("moe_down", run_down, down_error, TOLERANCE, size, moved, flops // 2)


def _experts(
    rig: Rig, rng: np.random.Generator, experts: int, n: int, k: int, kind: abi.WeightKind
) -> tuple[Packed, list[np.ndarray]]:
    """A packed stack in which a few distinct matrices take turns, and their values.

    Only the distinct ones go through a repack; the others are copies of packed bytes.
    """
    matrices = [random_matrix(rng, n, k) for _ in range(min(DISTINCT_EXPERTS, experts))]
    some = rig.pack(*matrices, kind=kind)
    desc = abi.WeightDesc(
        kind=kind,
        experts=experts,
        n=n,
        k=k,
        group=16,
        scale_type=abi.Type.E4M3,
        global_kind=abi.GlobalKind.MULTIPLIER,
    )
    nbytes = rig.library.weight_bytes(desc)
    buffer = rig.room(nbytes)
    whole = Packed(rig.library.weight_create(desc, buffer, nbytes), buffer)
    for first, stride in (
        ("codes", "codes_expert_bytes"),
        ("globals", "globals_expert_bytes"),
    ):
        source, target = (_address(getattr(each.handle, first)) for each in (some, whole))
        size = int(getattr(whole.handle, stride))
        parts = np.frombuffer(rig.memory.read(source, size * len(matrices)), np.uint8)
        every = parts.reshape(len(matrices), size)[np.arange(experts) % len(matrices)]
        rig.memory.write(target, np.ascontiguousarray(every))
    return whole, [values_of(matrix) for matrix in matrices]


def _address(pointer: object) -> int:
    """The number in a pointer field, whichever way ctypes shows it."""
    if isinstance(pointer, int):
        return pointer
    return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)  # type: ignore[arg-type]


def _pair_products(values: list[np.ndarray], experts: np.ndarray, x: np.ndarray) -> np.ndarray:
    """FP32 [pairs, N]: row i of x times the matrix of its expert."""
    found = np.empty((len(experts), values[0].shape[0]), np.float32)
    kinds = experts % len(values)
    for kind, matrix in enumerate(values):
        found[kinds == kind] = x[kinds == kind].astype(np.float32) @ matrix.T
    return found
