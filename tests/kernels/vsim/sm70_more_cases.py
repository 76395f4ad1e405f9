"""Checks of grouped products and small operations, as sm70_cases.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from sm70_cases import assert_close
from sm70_rig import Matrix, Rig, random_matrix

from appliance.nvfp4 import abi

if TYPE_CHECKING:
    from collections.abc import Callable


def _silu(z: np.ndarray) -> np.ndarray:
    return z / (1 + np.exp(-z))


def _grouped_is_right(
    rig: Rig, ids: np.ndarray, experts: int, *, width: int = 40, hidden: int = 80, **kind: object
) -> None:
    """Both products of one routing; `width` is the intermediate size."""
    rng = np.random.default_rng(ids.size * 31 + experts)
    m, top_k = ids.shape
    gate_up = [random_matrix(rng, 2 * width, hidden, **kind) for _ in range(experts)]  # type: ignore[arg-type]
    # k of the second product must be a multiple of 16 and of the group.
    down_k = 128 if "group" in kind else 48
    down = [random_matrix(rng, hidden, down_k, **kind) for _ in range(experts)]  # type: ignore[arg-type]
    x = rng.normal(size=(m, hidden)).astype(np.float16)
    middle = rng.normal(size=(m * top_k, down_k)).astype(np.float16)
    weights = rng.uniform(0.1, 1, (m, top_k)).astype(np.float32)
    plan = rig.plan(ids.astype(np.int32), experts)

    packed = rig.pack(*gate_up, kind=abi.WeightKind.GATE_UP)
    activated = rig.gate_up(packed, plan, ids, x)
    down_packed = rig.pack(*down)
    summed = rig.down(down_packed, plan, (ids, weights), middle)

    assert rig.gate_up(packed, plan, ids, x).tobytes() == activated.tobytes(), "two runs"
    assert rig.down(down_packed, plan, (ids, weights), middle).tobytes() == summed.tobytes()
    assert_close(activated, _right_gate_up(gate_up, ids, x), "gate_up")
    assert_close(summed, _right_down(down, ids, weights, middle), "down")
    rig.release()


def _right_gate_up(experts: list[Matrix], ids: np.ndarray, x: np.ndarray) -> np.ndarray:
    values = [matrix.values() for matrix in experts]
    width = values[0].shape[0] // 2
    right = np.zeros((ids.size, width))
    for pair, expert in enumerate(ids.reshape(-1)):
        if 0 <= expert < len(experts):
            z = values[expert] @ x[pair // ids.shape[1]].astype(np.float64)
            right[pair] = _silu(z[:width]) * z[width:]
    return right


def _right_down(
    experts: list[Matrix], ids: np.ndarray, weights: np.ndarray, x: np.ndarray
) -> np.ndarray:
    values = [matrix.values() for matrix in experts]
    right = np.zeros((ids.shape[0], values[0].shape[0]))
    for pair, expert in enumerate(ids.reshape(-1)):
        if 0 <= expert < len(experts):
            token = pair // ids.shape[1]
            weight = float(weights.reshape(-1)[pair])
            right[token] += weight * (values[expert] @ x[pair].astype(np.float64))
    return right


def _routing(m: int, top_k: int, used: int) -> np.ndarray:
    rng = np.random.default_rng(m * 7 + top_k)
    return np.stack([rng.permutation(used)[:top_k] for _ in range(m)]).astype(np.int32)


def grouped_products_are_right(rig: Rig) -> None:
    """Each row tile: 8, 16, 32 and 64 pairs; the last experts are empty."""
    for m, top_k, used, experts in ((1, 2, 5, 6), (9, 2, 5, 6), (30, 2, 5, 6), (50, 2, 5, 6)):
        _grouped_is_right(rig, _routing(m, top_k, used), experts)
    _grouped_is_right(rig, _routing(90, 2, 5), 6)


def grouped_products_skip_foreign_experts(rig: Rig) -> None:
    for m in (6, 90):
        ids = _routing(m, 2, 5)
        ids[::3, 0] = -1
        ids[1::4, 1] = 99
        _grouped_is_right(rig, ids, 6)
    _grouped_is_right(rig, np.full((4, 2), -1, np.int32), 6)


def grouped_products_of_few_tokens_are_right(rig: Rig) -> None:
    """Few pairs for the number of experts: the down product is one launch."""
    _grouped_is_right(rig, _routing(1, 3, 12), 12)
    _grouped_is_right(rig, _routing(2, 10, 80), 80, hidden=96)
    skipped = _routing(2, 3, 24)
    skipped[0, 1], skipped[1, :] = 99, -1
    _grouped_is_right(rig, skipped, 24)
    for kind in ({"group": 128, "scale_dtype": np.float16}, {"group": 32}):
        _grouped_is_right(rig, _routing(1, 2, 8), 8, hidden=128, **kind)


def grouped_products_take_all_tokens_on_one_expert(rig: Rig) -> None:
    for m in (5, 40, 150):
        _grouped_is_right(rig, np.full((m, 1), 3, np.int32), 8)


def grouped_products_take_whole_row_tiles(rig: Rig) -> None:
    """Experts with just as many pairs as one row tile or two, and others behind them."""
    for rows in (8, 16, 32, 64):
        counts = (rows, 2 * rows, 0, rows, 0, 0)
        _grouped_is_right(rig, np.repeat(np.arange(6), counts)[:, None], 6)


def grouped_products_take_repeated_experts(rig: Rig) -> None:
    """One expert in many slots of a token; divisors; the same bits twice."""
    for m, experts in ((1, 40), (9, 3), (40, 3)):
        ids = np.full((m, 8), experts - 1)
        ids[:, 1::3] = 0
        _grouped_is_right(rig, ids, experts, is_divisor=True)


def grouped_products_take_deep_experts(rig: Rig) -> None:
    """Many K steps: the kernels with eight warps over K."""
    for m in (3, 30, 60):
        _grouped_is_right(rig, _routing(m, 2, 4), 4, hidden=1040)


def grouped_products_take_other_groups(rig: Rig) -> None:
    for m in (3, 25, 45, 80):
        ids = _routing(m, 2, 5)
        _grouped_is_right(rig, ids, 6, hidden=128, group=128, scale_dtype=np.float16)
    _grouped_is_right(rig, _routing(7, 2, 5), 6, hidden=128, group=32)


def expert_maps_rename_experts(rig: Rig) -> None:
    rng = np.random.default_rng(3)
    experts = [random_matrix(rng, 64, 64) for _ in range(2)]
    ids = np.array([[0, 3], [2, 1], [3, 0]], np.int32)
    expert_map = np.array([-1, 1, -1, 0], np.int32)
    x = rng.normal(size=(3, 64)).astype(np.float16)

    plan = rig.plan(ids, 2, expert_map)
    packed = rig.pack(*experts, kind=abi.WeightKind.GATE_UP)
    found = rig.gate_up(packed, plan, ids, x)

    assert_close(found, _right_gate_up(experts, expert_map[ids], x), "mapped gate_up")


def norms_are_right(rig: Rig) -> None:
    rng = np.random.default_rng(8)
    for rows, hidden, offset in ((3, 64, 0.0), (2, 1037, 1.0), (1, 5120, 0.0)):
        for with_residual in (False, True):
            x = rng.normal(size=(rows, hidden)).astype(np.float16)
            residual = rng.normal(size=(rows, hidden)).astype(np.float16)
            gain = rng.normal(size=hidden).astype(np.float32)
            y = rig.room(x.nbytes)
            kept = rig.put(residual)
            rig.library.rms_norm(
                abi.Norm(
                    io_type=abi.Type.F16,
                    weight_type=abi.Type.F32,
                    eps=1e-6,
                    weight_offset=offset,
                    rows=rows,
                    hidden=hidden,
                    weight=rig.put(gain),
                    x=rig.put(x),
                    x_stride=hidden,
                    y=y,
                    y_stride=hidden,
                    residual=kept if with_residual else None,
                    residual_stride=hidden,
                )
            )
            total = x.astype(np.float64) + (residual if with_residual else 0)
            right = total / np.sqrt((total**2).mean(1, keepdims=True) + 1e-6) * (gain + offset)
            where = f"norm {rows}x{hidden}"
            assert_close(rig.get(y, x.shape, np.float16), right, where)
            if with_residual:
                assert_close(rig.get(kept, x.shape, np.float16), total, where)


def silu_mul_is_right(rig: Rig) -> None:
    rng = np.random.default_rng(9)
    for rows, width in ((3, 64), (2, 37)):
        x = rng.normal(size=(rows, 2 * width), scale=3).astype(np.float16)
        y = rig.room(rows * width * 2)
        rig.library.silu_mul(
            rows,
            width,
            io_type=abi.Type.F16,
            x=rig.put(x),
            x_stride=2 * width,
            y=y,
            y_stride=width,
        )
        wide = x.astype(np.float64)
        right = _silu(wide[:, :width]) * wide[:, width:]
        assert_close(rig.get(y, (rows, width), np.float16), right, f"silu_mul {rows}x{width}")


def rotary_rotates_and_writes_the_cache(rig: Rig) -> None:
    rng = np.random.default_rng(10)
    tokens, heads, kv_heads, dim, turn = 4, 3, 2, 16, 8
    blocks, block_size = 3, 4
    q = rng.normal(size=(tokens, heads, dim)).astype(np.float16)
    k = rng.normal(size=(tokens, kv_heads, dim)).astype(np.float16)
    v = rng.normal(size=(tokens, kv_heads, dim)).astype(np.float16)
    positions = np.array([0, 5, 2, 9], np.int64)
    slots = np.array([1, 6, -1, 6], np.int64)  # the last token replaces the second
    angles = rng.uniform(0, 6, (10, turn // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    cache = np.zeros((blocks, block_size, kv_heads, dim), np.float16)
    for is_neox in (0, 1):
        at = {name: rig.put(array) for name, array in (("q", q), ("k", k), ("v", v))}
        k_cache, v_cache = rig.put(cache), rig.put(cache)
        rig.library.rotary_write_kv(
            abi.Rotary(
                io_type=abi.Type.F16,
                tokens=tokens,
                q_heads=heads,
                kv_heads=kv_heads,
                head_dim=dim,
                rotary_dim=turn,
                is_neox=is_neox,
                cos_sin_type=abi.Type.F32,
                cos_sin=rig.put(table),
                max_position=10,
                positions=rig.put(positions),
                q=at["q"],
                q_stride=heads * dim,
                k=at["k"],
                k_stride=kv_heads * dim,
                v=at["v"],
                v_stride=kv_heads * dim,
                slots=rig.put(slots),
                k_cache=k_cache,
                v_cache=v_cache,
                blocks=blocks,
                block_size=block_size,
                cache_block_stride=block_size * kv_heads * dim,
                cache_token_stride=kv_heads * dim,
                cache_head_stride=dim,
            )
        )
        turned = _rotated(k, table[positions], is_neox=bool(is_neox))
        assert_close(
            rig.get(at["q"], q.shape, np.float16),
            _rotated(q, table[positions], is_neox=bool(is_neox)),
            "q",
        )
        assert_close(rig.get(at["k"], k.shape, np.float16), turned, "k")
        written = rig.get(k_cache, cache.shape, np.float16).reshape(-1, kv_heads, dim)
        assert_close(written[[1, 6]], turned[[0, 3]], "k cache")
        assert not written[[0, 2, 3, 4, 5, 7, 8, 9, 10, 11]].any()
        values = rig.get(v_cache, cache.shape, np.float16).reshape(-1, kv_heads, dim)
        assert np.array_equal(values[[1, 6]], v[[0, 3]])


def _rotated(rows: np.ndarray, turns: np.ndarray, *, is_neox: bool) -> np.ndarray:
    half = turns.shape[1] // 2
    first = np.arange(half) if is_neox else 2 * np.arange(half)
    second = first + half if is_neox else first + 1
    cosine, sine = turns[:, None, :half], turns[:, None, half:]
    right = rows.astype(np.float64)
    u, v = right[..., first].copy(), right[..., second].copy()
    right[..., first], right[..., second] = u * cosine - v * sine, v * cosine + u * sine
    return right


def routing_picks_the_largest(rig: Rig) -> None:
    rng = np.random.default_rng(11)
    for m, experts, top_k in ((5, 128, 8), (2, 7, 7), (3, 33, 1)):
        logits = rng.normal(size=(m, experts)).astype(np.float16)
        logits[0, :3] = 4  # a tie goes to the lower expert
        for renormalize in (False, True):
            ids, weights = rig.room(m * top_k * 4), rig.room(m * top_k * 4)
            rig.library.topk_softmax(
                rig.put(logits),
                m,
                experts=experts,
                top_k=top_k,
                logits_type=abi.Type.F16,
                logits_stride=experts,
                renormalize=renormalize,
                ids=ids,
                weights=weights,
            )
            order = np.argsort(-logits.astype(np.float64), axis=1, kind="stable")[:, :top_k]
            assert np.array_equal(rig.get(ids, (m, top_k), np.int32), order)
            soft = np.exp(logits.astype(np.float64))
            picked = np.take_along_axis(soft, order, 1)
            right = picked / (picked if renormalize else soft).sum(1, keepdims=True)
            assert_close(rig.get(weights, (m, top_k), np.float32), right, "weights")


def routing_shows_a_nan(rig: Rig) -> None:
    logits = np.zeros((1, 9), np.float16)
    logits[0, 4] = np.nan
    ids, weights = rig.room(8), rig.room(8)

    rig.library.topk_softmax(
        rig.put(logits),
        1,
        experts=9,
        top_k=2,
        logits_type=abi.Type.F16,
        logits_stride=9,
        renormalize=True,
        ids=ids,
        weights=weights,
    )

    assert rig.get(ids, (2,), np.int32).tolist() == [0, 1]
    assert np.isnan(rig.get(weights, (2,), np.float32)).all()


MORE_CASES: dict[str, Callable[[Rig], None]] = {
    check.__name__: check
    for check in (
        grouped_products_are_right,
        grouped_products_skip_foreign_experts,
        grouped_products_of_few_tokens_are_right,
        grouped_products_take_all_tokens_on_one_expert,
        grouped_products_take_whole_row_tiles,
        grouped_products_take_repeated_experts,
        grouped_products_take_deep_experts,
        grouped_products_take_other_groups,
        expert_maps_rename_experts,
        norms_are_right,
        silu_mul_is_right,
        rotary_rotates_and_writes_the_cache,
        routing_picks_the_largest,
        routing_shows_a_nan,
    )
}
