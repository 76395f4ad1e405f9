"""RMSNorm, silu-mul, rotary positions and the KV-cache write of the reference library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from appliance.nvfp4 import abi

DTYPES = (np.float16, np.float32)


def _within_rounding(values: np.ndarray, exact: np.ndarray) -> None:
    np.testing.assert_allclose(
        values.astype(np.float64), exact, rtol=np.finfo(values.dtype).eps, atol=1e-7
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_equals_numpy(
    dtype: type, weight_dtype: type, offset: float, *, rng: np.random.Generator, on_host: Any
) -> None:
    x = rng.standard_normal((5, 67)).astype(dtype)
    weight = rng.standard_normal(67).astype(weight_dtype)
    y = np.full((5, 70), 9, dtype)

    on_host.library.rms_norm(
        _norm(on_host, x, weight, y, hidden=67, weight_offset=offset, eps=1e-6)
    )

    wide = x.astype(np.float64)
    inverse = 1 / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6)
    _within_rounding(y[:, :67], wide * inverse * (weight.astype(np.float64) + offset))
    assert (y[:, 67:] == 9).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_residual_adds_first_and_works_in_place(
    dtype: type, rng: np.random.Generator, on_host: Any
) -> None:
    x = rng.standard_normal((4, 32)).astype(dtype)
    residual = rng.standard_normal((4, 32)).astype(dtype)
    total = x.astype(np.float64) + residual.astype(np.float64)
    weight = rng.standard_normal(32).astype(dtype)
    norm = _norm(on_host, x, weight, x, hidden=32, eps=1e-5)
    norm.residual, norm.residual_stride = residual.ctypes.data, 32

    on_host.library.rms_norm(norm)

    inverse = 1 / np.sqrt((total**2).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_array_equal(residual, total.astype(dtype))
    _within_rounding(x, total * inverse * weight.astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_equals_numpy_without_overflow(dtype: type, on_host: Any) -> None:
    x = np.array([[-60000, -20, -1, 0, 1, 20, 60000, 3, 3, 3, 3, 3, 3, 1]], dtype)
    y = np.empty((1, 7), dtype)

    on_host.library.silu_mul(
        1, 7, io_type=on_host.type_of(x), x=x.ctypes.data, x_stride=14, y=y.ctypes.data, y_stride=7
    )

    gate, up = x[0, :7].astype(np.float64), x[0, 7:].astype(np.float64)
    with np.errstate(over="ignore"):
        _within_rounding(y[0], gate / (1 + np.exp(-gate)) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_rotary_turns_pairs_of_each_head(
    dtype: type, rotary_dim: int, *, is_neox: bool, rng: np.random.Generator, on_host: Any
) -> None:
    q = rng.standard_normal((3, 4 * 16)).astype(dtype)
    k = rng.standard_normal((3, 2 * 16)).astype(dtype)
    positions = np.array([0, 5, 31], np.int64)
    cos_sin = _cos_sin(32, rotary_dim)
    expected_q = _turned(q.reshape(3, 4, 16), positions, cos_sin, is_neox=is_neox)
    expected_k = _turned(k.reshape(3, 2, 16), positions, cos_sin, is_neox=is_neox)
    rotary = _rotary(on_host, q, k, cos_sin, positions)
    rotary.is_neox = int(is_neox)

    on_host.library.rotary_write_kv(rotary)

    _within_rounding(q.reshape(3, 4, 16), expected_q)
    _within_rounding(k.reshape(3, 2, 16), expected_k)


def test_rotary_leaves_tokens_outside_of_the_table_alone(
    rng: np.random.Generator, on_host: Any
) -> None:
    q = rng.standard_normal((2, 64)).astype(np.float32)
    k = rng.standard_normal((2, 32)).astype(np.float32)
    before = q.copy()
    positions = np.array([-1, 32], np.int64)

    on_host.library.rotary_write_kv(_rotary(on_host, q, k, _cos_sin(32, 16), positions))

    np.testing.assert_array_equal(q, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_write_puts_rotated_k_and_v_into_their_slots(
    dtype: type, rng: np.random.Generator, on_host: Any
) -> None:
    k = rng.standard_normal((5, 32)).astype(dtype)
    v = rng.standard_normal((5, 2 * 16 + 8)).astype(dtype)
    # [2, blocks, block_size, heads, head_dim] as vLLM keeps it.
    cache = np.zeros((2, 3, 4, 2, 16), dtype)
    slots = np.array([0, 7, -1, 11, 12], np.int64)  # 12 is beyond the three blocks
    positions = np.arange(5, dtype=np.int64)
    rotary = _rotary(on_host, None, k, _cos_sin(32, 16), positions)
    rotary.v, rotary.v_stride = v.ctypes.data, v.shape[1]
    rotary.slots = slots.ctypes.data
    rotary.k_cache, rotary.v_cache = cache[0].ctypes.data, cache[1].ctypes.data
    rotary.blocks, rotary.block_size = 3, 4
    rotary.cache_block_stride, rotary.cache_token_stride, rotary.cache_head_stride = 128, 32, 16

    on_host.library.rotary_write_kv(rotary)

    expected = np.zeros_like(cache)
    for token, slot in ((0, 0), (1, 7), (3, 11)):
        expected[0, slot // 4, slot % 4] = k[token].reshape(2, 16)
        expected[1, slot // 4, slot % 4] = v[token, :32].reshape(2, 16)
    np.testing.assert_array_equal(cache, expected)


def test_cache_write_without_rotation_leaves_k_alone(
    rng: np.random.Generator, on_host: Any
) -> None:
    k = rng.standard_normal((1, 32)).astype(np.float32)
    before = k.copy()
    cache = np.zeros((2, 1, 1, 2, 16), np.float32)
    slots = np.zeros(1, np.int64)
    rotary = abi.Rotary(io_type=abi.Type.F32, tokens=1, kv_heads=2, head_dim=16)
    rotary.k, rotary.k_stride = k.ctypes.data, 32
    rotary.v, rotary.v_stride = k.ctypes.data, 32
    rotary.slots = slots.ctypes.data
    rotary.k_cache, rotary.v_cache = cache[0].ctypes.data, cache[1].ctypes.data
    rotary.blocks = rotary.block_size = 1
    rotary.cache_block_stride = rotary.cache_token_stride = 32
    rotary.cache_head_stride = 16

    on_host.library.rotary_write_kv(rotary)

    np.testing.assert_array_equal(k, before)
    np.testing.assert_array_equal(cache[0].reshape(-1), before[0])


def _norm(
    on_host: Any, x: np.ndarray, weight: np.ndarray, y: np.ndarray, **fields: float
) -> abi.Norm:
    return abi.Norm(
        io_type=on_host.type_of(x),
        weight_type=on_host.type_of(weight),
        rows=len(x),
        weight=weight.ctypes.data,
        x=x.ctypes.data,
        x_stride=x.shape[1],
        y=y.ctypes.data,
        y_stride=y.shape[1],
        **fields,
    )


def _rotary(
    on_host: Any,
    q: np.ndarray | None,
    k: np.ndarray,
    cos_sin: np.ndarray,
    positions: np.ndarray,
) -> abi.Rotary:
    return abi.Rotary(
        io_type=on_host.type_of(k),
        tokens=len(k),
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        rotary_dim=cos_sin.shape[1],
        is_neox=1,
        cos_sin_type=abi.Type.F32,
        cos_sin=cos_sin.ctypes.data,
        max_position=len(cos_sin),
        positions=positions.ctypes.data,
        q=0 if q is None else q.ctypes.data,
        q_stride=64,
        k=k.ctypes.data,
        k_stride=k.shape[1],
    )


def _cos_sin(positions: int, rotary_dim: int) -> np.ndarray:
    frequencies = 10000.0 ** (-np.arange(rotary_dim // 2) / (rotary_dim // 2))
    angles = np.arange(positions)[:, np.newaxis] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _turned(
    heads: np.ndarray, positions: np.ndarray, cos_sin: np.ndarray, *, is_neox: bool
) -> np.ndarray:
    """The rotation by complex multiplication, another way than the library's."""
    half = cos_sin.shape[1] // 2
    table = cos_sin[positions].astype(np.float64)
    turn = (table[:, :half] + 1j * table[:, half:])[:, np.newaxis]
    wide = heads.astype(np.float64)
    first, second = (
        (slice(0, half), slice(half, 2 * half))
        if is_neox
        else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    turned = (wide[..., first] + 1j * wide[..., second]) * turn
    result = wide.copy()
    result[..., first], result[..., second] = turned.real, turned.imag
    return result
