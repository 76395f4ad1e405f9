"""Routing and grouped products of the reference library against a plain computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from appliance.nvfp4 import abi


@dataclass(frozen=True)
class Experts:
    """Packed experts and their FP32 values."""

    gate_up: Any
    down: Any
    w13: np.ndarray  # [E, 2 I, H]
    w2: np.ndarray  # [E, H, I]


@pytest.fixture
def experts(rng: np.random.Generator, linear_factory: Any, on_host: Any) -> Experts:
    count, hidden, width = 6, 96, 48
    gate_up = on_host.pack(
        *(linear_factory(rng, 2 * width, hidden) for _ in range(count)),
        kind=abi.WeightKind.GATE_UP,
    )
    down = on_host.pack(*(linear_factory(rng, hidden, width) for _ in range(count)))
    return Experts(
        gate_up,
        down,
        np.stack([on_host.dequantize(gate_up, expert=e) for e in range(count)]),
        np.stack([on_host.dequantize(down, expert=e) for e in range(count)]),
    )


def _expected(
    experts: Experts, x: np.ndarray, ids: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Activations [m, top_k, I] in FP64 and the result from activations rounded as `x` is."""
    width = experts.w2.shape[2]
    hidden = np.zeros((*ids.shape, width))
    for token, slot in np.ndindex(*ids.shape):
        if 0 <= ids[token, slot] < len(experts.w2):
            both = experts.w13[ids[token, slot]].astype(np.float64) @ x[token].astype(np.float64)
            gate, up = both[:width], both[width:]
            hidden[token, slot] = gate / (1 + np.exp(-gate)) * up
    result = np.zeros((len(x), experts.w2.shape[1]))
    for token, slot in np.ndindex(*ids.shape):
        if 0 <= ids[token, slot] < len(experts.w2):
            rounded = hidden[token, slot].astype(x.dtype).astype(np.float64)
            product = experts.w2[ids[token, slot]].astype(np.float64) @ rounded
            result[token] += weights[token, slot].astype(np.float64) * product
    return hidden, result


def _run(
    on_host: Any,
    experts: Experts,
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    *,
    expert_map: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    library, io_type = on_host.library, on_host.type_of(x)
    m, top_k = ids.shape
    count = experts.gate_up.handle.experts
    plan = on_host.aligned(library.moe_plan_bytes(m, top_k, count))
    library.moe_plan(
        ids.ctypes.data,
        m,
        top_k=top_k,
        experts=count,
        plan=plan.ctypes.data,
        plan_bytes=plan.nbytes,
        expert_map=0 if expert_map is None else expert_map.ctypes.data,
        map_size=0 if expert_map is None else len(expert_map),
    )
    workspace = on_host.aligned(
        library.moe_workspace_bytes(experts.gate_up.handle, experts.down.handle, m, top_k)
    )
    hidden = np.full((m * top_k, experts.w2.shape[2]), np.nan, x.dtype)
    y = np.full((m, experts.w2.shape[1]), np.nan, x.dtype)
    common = {
        "top_k": top_k,
        "plan": plan.ctypes.data,
        "plan_bytes": plan.nbytes,
        "io_type": io_type,
        "workspace": workspace.ctypes.data,
        "workspace_bytes": workspace.nbytes,
    }
    library.moe_gate_up(
        experts.gate_up.handle,
        m,
        x=x.ctypes.data,
        x_stride=x.shape[1],
        y=hidden.ctypes.data,
        y_stride=hidden.shape[1],
        **common,
    )
    library.moe_down(
        experts.down.handle,
        m,
        x=hidden.ctypes.data,
        x_stride=hidden.shape[1],
        topk_weights=weights.ctypes.data,
        y=y.ctypes.data,
        y_stride=y.shape[1],
        **common,
    )
    return hidden.reshape(m, top_k, -1), y


def _assert_equal_to_rounding(values: np.ndarray, exact: np.ndarray) -> None:
    scale = np.abs(exact).max()
    np.testing.assert_allclose(values, exact, rtol=np.finfo(values.dtype).eps, atol=2**-20 * scale)


def _routing(rng: np.random.Generator, m: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.stack([rng.permutation(6)[:top_k] for _ in range(m)]).astype(np.int32)
    return ids, rng.uniform(0, 1, (m, top_k)).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("m", "top_k"), [(1, 1), (1, 4), (5, 2), (40, 3)])
def test_grouped_products_equal_the_plain_computation(
    dtype: type, m: int, top_k: int, *, experts: Experts, rng: np.random.Generator, on_host: Any
) -> None:
    ids, weights = _routing(rng, m, top_k)
    x = rng.standard_normal((m, 96)).astype(dtype)

    hidden, y = _run(on_host, experts, x, ids, weights)

    expected_hidden, expected = _expected(experts, x, ids, weights)
    _assert_equal_to_rounding(hidden, expected_hidden)
    _assert_equal_to_rounding(y, expected)


def test_all_tokens_on_one_expert_equal_the_plain_computation(
    experts: Experts, rng: np.random.Generator, on_host: Any
) -> None:
    ids = np.full((33, 1), 4, np.int32)
    weights = np.ones((33, 1), np.float32)
    x = rng.standard_normal((33, 96)).astype(np.float32)

    hidden, y = _run(on_host, experts, x, ids, weights)

    expected_hidden, expected = _expected(experts, x, ids, weights)
    _assert_equal_to_rounding(hidden, expected_hidden)
    _assert_equal_to_rounding(y, expected)


@pytest.mark.parametrize("bad", [-1, 6, 2**31 - 1, -(2**31)])
def test_pairs_of_no_local_expert_add_nothing(
    bad: int, experts: Experts, rng: np.random.Generator, on_host: Any
) -> None:
    ids, weights = _routing(rng, 7, 2)
    ids[3] = bad
    ids[5, 0] = bad
    x = rng.standard_normal((7, 96)).astype(np.float32)

    hidden, y = _run(on_host, experts, x, ids, weights)

    _, expected = _expected(experts, x, ids, weights)
    assert not hidden[3].any()
    assert not y[3].any()
    _assert_equal_to_rounding(y, expected)


def test_expert_map_picks_the_local_experts(
    experts: Experts, rng: np.random.Generator, on_host: Any
) -> None:
    # This rank holds global experts 10 .. 15 as 0 .. 5; the other half lives elsewhere.
    expert_map = np.array([-1] * 10 + list(range(6)), np.int32)
    global_ids = rng.integers(0, 16, (12, 3)).astype(np.int32)
    weights = rng.uniform(0, 1, (12, 3)).astype(np.float32)
    x = rng.standard_normal((12, 96)).astype(np.float32)

    _, y = _run(on_host, experts, x, global_ids, weights, expert_map=expert_map)

    _, expected = _expected(experts, x, expert_map[global_ids], weights)
    _assert_equal_to_rounding(y, expected)


def test_handed_experts_with_their_own_globals_equal_the_plain_computation(
    linears_in: Any, every_linear: Any, rng: np.random.Generator, on_host: Any
) -> None:
    case = "moe_stacked_modelopt"
    linears = linears_in(case)
    names = [[f"experts.{part}[{e}]" for e in range(4)] for part in ("gate_up_proj", "down_proj")]
    experts = Experts(
        on_host.pack(*(linears[name] for name in names[0]), kind=abi.WeightKind.GATE_UP),
        on_host.pack(*(linears[name] for name in names[1])),
        np.stack([every_linear[f"{case}/{name}"].expected for name in names[0]]),
        np.stack([every_linear[f"{case}/{name}"].expected for name in names[1]]),
    )
    ids = rng.integers(0, 4, (9, 2)).astype(np.int32)
    weights = rng.uniform(0, 1, (9, 2)).astype(np.float32)
    x = rng.standard_normal((9, 64)).astype(np.float32)

    _, y = _run(on_host, experts, x, ids, weights)

    _, expected = _expected(experts, x, ids, weights)
    _assert_equal_to_rounding(y, expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("renormalize", [False, True])
def test_topk_softmax_equals_numpy(
    dtype: type, *, renormalize: bool, rng: np.random.Generator, on_host: Any
) -> None:
    logits = (4 * rng.standard_normal((20, 128))).astype(dtype)
    logits[7] = logits[7, 0]  # all equal: the lowest experts win

    ids, weights = _topk(on_host, logits, 8, renormalize=renormalize)

    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    order = np.argsort(-logits.astype(np.float64), axis=1, kind="stable")[:, :8]
    expected = np.take_along_axis(shifted / shifted.sum(axis=1, keepdims=True), order, axis=1)
    if renormalize:
        expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_topk_softmax_of_rows_without_softmax_gives_nan_and_legal_ids(on_host: Any) -> None:
    logits = np.zeros((4, 5), np.float32)
    logits[0, 3] = np.nan
    logits[1, 2] = np.inf
    logits[2] = -np.inf
    logits[3, 1:] = -np.inf

    ids, weights = _topk(on_host, logits, 2, renormalize=True)

    np.testing.assert_array_equal(ids, [[0, 1]] * 4)
    assert np.isnan(weights[:3]).all()
    np.testing.assert_array_equal(weights[3], [1, 0])


def _topk(
    on_host: Any, logits: np.ndarray, top_k: int, *, renormalize: bool
) -> tuple[np.ndarray, np.ndarray]:
    ids = np.full((len(logits), top_k), -7, np.int32)
    weights = np.full((len(logits), top_k), -7, np.float32)
    on_host.library.topk_softmax(
        logits.ctypes.data,
        len(logits),
        experts=logits.shape[1],
        top_k=top_k,
        logits_type=on_host.type_of(logits),
        logits_stride=logits.shape[1],
        renormalize=renormalize,
        ids=ids.ctypes.data,
        weights=weights.ctypes.data,
    )
    return ids, weights
