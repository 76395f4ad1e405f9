"""The product of the reference library against FP64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.nvfp4 import abi


def _assert_close(
    y: np.ndarray, x: np.ndarray, w: np.ndarray, bias: np.ndarray | float = 0
) -> None:
    """One rounding of the exact sum, plus what FP64 itself loses."""
    exact = x.astype(np.float64) @ w.astype(np.float64).T + bias
    lost = 1e-12 * (np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T)
    info = np.finfo(y.dtype)
    rounding = np.maximum(np.abs(exact) * info.eps / 2, float(info.smallest_subnormal))
    # `w` is the FP32 value of weights whose global has its own rounding.
    inexact_weights = 2**-24 * (np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T)
    bad = np.abs(y - exact) > rounding + lost + inexact_weights
    assert not bad.any(), f"shape {y.shape}, first {np.argwhere(bad)[0]}"


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 20),
    n=st.one_of(st.sampled_from([1, 7, 31]), st.integers(1, 40)),
    blocks=st.integers(1, 6),
    group=st.sampled_from([16, 32, 64, 128]),
    dtype=st.sampled_from([np.float16, np.float32]),
    is_divisor=st.booleans(),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_matmul_of_any_shape_equals_fp64(
    *,
    m: int,
    n: int,
    blocks: int,
    group: int,
    dtype: type,
    is_divisor: bool,
    has_bias: bool,
    seed: int,
    on_host: Any,
    linear_factory: Any,
) -> None:
    rng = np.random.default_rng(seed)
    linear = linear_factory(rng, n, blocks * group, group=group, is_divisor=is_divisor)
    x = rng.standard_normal((m, linear.k)).astype(dtype)
    bias = rng.standard_normal(n).astype(dtype) if has_bias else None
    packed = on_host.pack(linear)

    y = on_host.matmul(packed, x, bias)

    weights = on_host.dequantize(packed)
    _assert_close(y, x, weights, 0 if bias is None else bias.astype(np.float64))


@pytest.mark.parametrize(("n", "k"), [(4120, 48), (8240, 16), (33, 17408), (7, 5120)])
def test_matmul_of_model_shapes_equals_fp64(
    n: int, k: int, rng: np.random.Generator, linear_factory: Any, on_host: Any
) -> None:
    packed = on_host.pack(linear_factory(rng, n, k))
    x = rng.standard_normal((9, k)).astype(np.float16)

    y = on_host.matmul(packed, x)

    _assert_close(y, x, on_host.dequantize(packed))


def test_matmul_on_any_number_of_threads_gives_the_same_bits(
    rng: np.random.Generator, linear_factory: Any, on_host: Any
) -> None:
    packed = on_host.pack(linear_factory(rng, 300, 2048))
    x = rng.standard_normal((17, 2048)).astype(np.float32)

    results = []
    for threads in (1, 2, 3, 16, 0):
        on_host.library.set_threads(threads)
        results.append(on_host.matmul(packed, x))

    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_sums_beyond_fp16_before_the_global_do_not_overflow(on_host: Any, linear_type: Any) -> None:
    n, k = 3, 1024
    codes = np.full((n, k // 2), 0x77, np.uint8)  # 6 everywhere
    scales = np.full((n, k // 16), 0x7E, np.uint8)  # 448
    linear = linear_type(codes, scales, np.full(n, 1e-6, np.float32), False)
    x = np.full((2, k), 8, np.float16)

    y = on_host.matmul(on_host.pack(linear), x)

    unscaled = 6 * 448 * 8 * k
    assert unscaled > 65504
    np.testing.assert_allclose(y, unscaled * 1e-6, rtol=2**-11)


def test_matmul_writes_the_rows_of_y_and_nothing_between(
    rng: np.random.Generator, linear_factory: Any, on_host: Any
) -> None:
    packed = on_host.pack(linear_factory(rng, 7, 32))
    x = rng.standard_normal((4, 48)).astype(np.float32)
    y = np.full((4, 10), 5, np.float32)
    workspace = on_host.aligned(on_host.library.matmul_workspace_bytes(packed.handle, 4))

    on_host.library.matmul(
        packed.handle,
        4,
        io_type=abi.Type.F32,
        x=x.ctypes.data,
        x_stride=48,
        y=y.ctypes.data,
        y_stride=10,
        workspace=workspace.ctypes.data,
        workspace_bytes=workspace.nbytes,
    )

    assert (y[:, 7:] == 5).all()
    np.testing.assert_array_equal(y[:, :7], on_host.matmul(packed, x[:, :32].copy()))


def test_workspace_stays_within_the_limit_of_the_abi(on_host: Any, linear_type: Any) -> None:
    for k in (16, 17408, 131072):
        linear = linear_type(
            np.zeros((1, k // 2), np.uint8),
            np.zeros((1, k // 16), np.uint8),
            np.ones(1, np.float32),
            False,
        )
        packed = on_host.pack(linear)

        assert on_host.library.matmul_workspace_bytes(packed.handle, 4096) <= (
            abi.WORKSPACE_LIMIT_BYTES
        )


def test_choose_on_the_host_names_the_reference_kernel(on_host: Any) -> None:
    problem = abi.Problem(
        kind=1, m=8, n=4120, k=5120, experts=1, top_k=1, group=16, scale_type=abi.Type.E4M3
    )

    choice = on_host.library.choose(problem)

    assert choice.kernel == abi.Kernel.HOST
    assert on_host.library.kernel_name(choice.kernel) == "host"
    assert choice.slice_rows == 0


def test_self_test_passes_with_the_stored_checksum(on_host: Any) -> None:
    result = on_host.library.self_test()

    assert result.checksum == result.expected
    assert result.bad_problem == -1
    assert result.problems == 14
    assert result.elapsed_s < 3
