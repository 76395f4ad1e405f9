"""Checks of the sm_70 library against FP64, each a function of a rig; they raise AssertionError.

The same checks run on the modelled V100 (the Volta code itself) and on a newer GPU (the PTX).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from sm70_rig import E2M1, E4M3, Matrix, Rig, random_matrix

from appliance.nvfp4 import abi
from appliance.nvfp4.error import LibraryError

if TYPE_CHECKING:
    from collections.abc import Callable

TOLERANCE = 1e-3
"""Of the largest value: FP16 rounds to 4.9e-4, FP32 sums and FP16 inputs leave the rest."""


def assert_close(found: np.ndarray, right: np.ndarray, where: str) -> None:
    """Compare with FP64 values, relative to the largest; name the worst coordinate."""
    assert np.isfinite(found).all(), f"{where}: not finite at {np.argwhere(~np.isfinite(found))[0]}"
    error = np.abs(found.astype(np.float64) - right) / max(float(np.abs(right).max()), 1e-30)
    at = np.unravel_index(int(error.argmax()), error.shape)
    assert error[at] <= TOLERANCE, (
        f"{where}: at {[int(i) for i in at]} {found[at]} for {right[at]}, error {error[at]:.2e}"
    )


def every_product() -> Matrix:
    """127 rows, one a scale code; columns 0..15 are the 16 nibbles, and again to 64."""
    codes = np.arange(64) % 16
    row = (codes[0::2] | codes[1::2] << 4).astype(np.uint8)
    scales = np.repeat(np.arange(127, dtype=np.uint8)[:, None], 4, axis=1)
    return Matrix(np.tile(row, (127, 1)), scales, np.ones(127, np.float32))


def repack_keeps_every_product(rig: Rig) -> None:
    matrix = every_product()
    right = np.outer(E4M3, np.tile(E2M1, 4))

    weight = rig.pack(matrix)

    for dtype in (np.float32, np.float16):
        found = rig.dequantize(weight, dtype=dtype)
        assert np.array_equal(found.astype(np.float64), right), f"dequantize to {dtype.__name__}"


def kernels_keep_every_product(rig: Rig) -> None:
    """One-hot tokens pick single products; M chooses each kernel."""
    weight = rig.pack(every_product())
    right = np.outer(E4M3, E2M1).T
    for m in (1, 8, 16, 32, 64):
        for first in range(0, 16, min(m, 16)):
            picked = (np.arange(m) + first) % 16
            x = np.zeros((m, 64), np.float16)
            x[np.arange(m), picked + 16 * (np.arange(m) % 4)] = 1
            found = rig.matmul(weight, x)
            wrong = np.argwhere(found.astype(np.float64) != right[picked])
            assert wrong.size == 0, f"M={m}: first wrong at {wrong[0]}"


def product_is_right(rig: Rig, m: int, n: int, k: int, **kind: object) -> None:
    rng = np.random.default_rng(m * 1_000_003 + n * 1009 + k)
    matrix = random_matrix(rng, n, k, **kind)  # type: ignore[arg-type]
    x = rng.normal(size=(m, k)).astype(np.float16)
    bias = rng.normal(size=n).astype(np.float16)

    found = rig.matmul(rig.pack(matrix), x, bias=bias)

    right = x.astype(np.float64) @ matrix.values().T + bias.astype(np.float64)
    assert_close(found, right, f"matmul {m}x{n}x{k} {kind}")
    rig.release()


SMALL_SHAPES = (
    *((m, n, 48) for m in (1, 7, 8, 9, 16, 17, 31, 32, 33, 64, 100) for n in (1, 31, 33)),
    *((m, 7, 16) for m in (1, 9, 17, 33)),
    *((m, 130, 576) for m in (1, 5, 12, 16, 24, 32, 65, 128)),
    (257, 70, 80),
    (3, 4120, 64),
    (20, 4120, 64),
    # Enough CTAs to start at different steps, and shared blocks of two column groups.
    *((m, 4120, 320) for m in (5, 12, 27)),
    (20, 7700, 768),
)


def products_of_small_shapes_are_right(rig: Rig) -> None:
    for m, n, k in SMALL_SHAPES:
        product_is_right(rig, m, n, k)


def products_of_deep_shapes_are_right(rig: Rig) -> None:
    """K splits, even and uneven: few columns, many steps."""
    for m in (1, 8, 13, 29, 40):
        product_is_right(rig, m, 33, 5120)
        product_is_right(rig, m, 33, 3088)


def products_of_other_groups_are_right(rig: Rig) -> None:
    for m in (2, 11, 30, 50):
        for group in (32, 64, 128):
            product_is_right(rig, m, 45, 384, group=group)
        for dtype in (np.float16, np.float32):
            product_is_right(rig, m, 45, 384, group=128, scale_dtype=dtype)
        product_is_right(rig, m, 45, 192, group=64, scale_dtype=np.float16, is_divisor=True)


def products_with_divisors_are_right(rig: Rig) -> None:
    for m in (4, 18, 40):
        product_is_right(rig, m, 37, 128, is_divisor=True)


def sums_beyond_half_do_not_overflow(rig: Rig) -> None:
    """Sums of 2e8 before a global of 2^-14."""
    n, k = 40, 512
    codes = np.full((n, k // 2), 0x77, np.uint8)
    scales = np.full((n, k // 16), 0x7E, np.uint8)
    matrix = Matrix(codes, scales, np.full(n, 2.0**-14, np.float32))
    weight = rig.pack(matrix)
    for m in (3, 14, 26, 70):
        found = rig.matmul(weight, np.full((m, k), 128, np.float16))
        assert_close(found, np.full((m, n), 128.0 * k * 2688 * 2.0**-14), f"M={m}")


def rows_past_m_never_matter(rig: Rig) -> None:
    """A NaN or an infinity in one token stays in its row, in padded columns of k too."""
    rng = np.random.default_rng(4)
    for k, bad in ((128, np.nan), (128, np.inf), (80, np.nan), (80, -np.inf)):
        matrix = random_matrix(rng, 64, k)
        weight = rig.pack(matrix)
        for m in (5, 15, 25, 60):
            x = rng.normal(size=(m, k)).astype(np.float16)
            x[m - 2, k - 1] = bad
            found = rig.matmul(weight, x)
            # Codes of zero take an infinity to NaN, the others to an infinity.
            assert not np.isfinite(found[m - 2]).any()
            good = np.delete(np.arange(m), m - 2)
            right = x[good].astype(np.float64) @ matrix.values().T
            assert_close(found[good], right, f"M={m} K={k} {bad}")
        rig.release()


def two_runs_are_bit_equal(rig: Rig) -> None:
    rng = np.random.default_rng(5)
    weight = rig.pack(random_matrix(rng, 96, 1040))
    for m in (1, 16, 32, 64):
        x = rng.normal(size=(m, 1040)).astype(np.float16)
        first, second = rig.matmul(weight, x), rig.matmul(weight, x)
        assert first.tobytes() == second.tobytes(), f"M={m}"


def parts_and_slices_are_placed(rig: Rig) -> None:
    """A weight packed in uneven parts equals the whole; slices of it dequantize alike."""
    rng = np.random.default_rng(6)
    for kind in abi.WeightKind:
        whole = random_matrix(rng, 90, 112)
        weight = rig.pack(whole, kind=kind)
        expected = rig.dequantize(weight)
        report = rig.room(64)
        rig.library.report_reset(report)
        again = rig.pack(Matrix(whole.codes * 0, whole.scales, whole.row_globals), kind=kind)
        for begin, end in ((0, 1), (1, 33), (33, 90)):
            part = Matrix(
                whole.codes[begin:end].copy(),
                whole.scales[begin:end].copy(),
                whole.row_globals[begin:end].copy(),
            )
            rig.repack(again, part, report=report, row_begin=begin)
        assert np.array_equal(rig.dequantize(again), expected)
        right = whole.values().astype(np.float32)
        assert np.array_equal(expected, right), f"kind {kind.name}"
        half = rig.dequantize(weight, dtype=np.float16, row_begin=30, rows=41)
        assert np.array_equal(half, right[30:71].astype(np.float16))


def every_kind_of_weight_is_decoded(rig: Rig) -> None:
    """Each scale type and group, both kinds of globals and results, with globals and without."""
    rng = np.random.default_rng(12)
    kinds = [(group, np.uint8) for group in (16, 32, 64, 128)]
    kinds += [(group, dtype) for group in (64, 128) for dtype in (np.float16, np.float32)]
    for (group, scale_dtype), is_divisor in itertools.product(kinds, (False, True)):
        matrix = random_matrix(
            rng, 37, 384, group=group, scale_dtype=scale_dtype, is_divisor=is_divisor
        )
        weight = rig.pack(matrix)
        where = f"group {group}, {scale_dtype.__name__}, is_divisor {is_divisor}"
        right = matrix.values().astype(np.float32)
        # A quotient of an FP32 scale may round twice.
        slack = np.spacing(np.abs(right)) if scale_dtype == np.float32 and is_divisor else 0
        found, halves = rig.dequantize(weight), rig.dequantize(weight, dtype=np.float16)
        assert (np.abs(found - right) <= slack).all(), where
        assert np.array_equal(halves, found.astype(np.float16)), where
        bare = rig.dequantize(weight, flags=abi.Dequantize.UNSCALED)
        assert np.array_equal(bare, matrix.unscaled().astype(np.float32)), where
        rig.release()


def faults_of_scales_are_named(rig: Rig) -> None:
    rng = np.random.default_rng(7)
    wanted = {0x7F: "NVFP4_ESCALE_NAN", 0xFF: "NVFP4_ESCALE_NAN", 0x80: "NVFP4_ESCALE_NEGATIVE"}
    for code, name in wanted.items():
        matrix = random_matrix(rng, 40, 160)
        matrix.scales[34, 7] = code
        try:
            rig.pack(matrix)
        except LibraryError as error:
            text = str(error.faults[0])
            assert name in text, text
            assert "row 34" in text, text
            assert "block 7" in text, text
        else:
            raise AssertionError(f"scale code {code:#x} was accepted")


CASES: dict[str, Callable[[Rig], None]] = {
    check.__name__: check
    for check in (
        repack_keeps_every_product,
        kernels_keep_every_product,
        products_of_small_shapes_are_right,
        products_of_deep_shapes_are_right,
        products_of_other_groups_are_right,
        products_with_divisors_are_right,
        sums_beyond_half_do_not_overflow,
        rows_past_m_never_matter,
        two_runs_are_bit_equal,
        parts_and_slices_are_placed,
        every_kind_of_weight_is_decoded,
        faults_of_scales_are_named,
    )
}
