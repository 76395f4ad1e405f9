"""The encoder against compressed-tensors, against a plain numpy sweep, and against itself."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.checkpoint.tensors import open_tensors
from appliance.quantize import native
from appliance.quantize.native import Mode, divisor_of, encode, scan

Packer = Callable[..., tuple[np.ndarray, np.ndarray, np.float32]]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def unpack(packed: np.ndarray) -> np.ndarray:
    """FP32 values [N, K] of packed codes [N, K/2]."""
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    return np.where(nibbles & 8, -1, 1).astype(np.float32) * E2M1[nibbles & 7]


def dequantized(encoded: native.Encoded, divisor: np.float32) -> np.ndarray:
    values = unpack(encoded.packed).astype(np.float64)
    scales = np.repeat(E4M3[encoded.scales].astype(np.float64), 16, axis=1)
    return values * scales / np.float64(divisor)


def relative_mse(weights: np.ndarray, encoded: native.Encoded, divisor: np.float32) -> float:
    exact = weights.astype(np.float64)
    return float(((exact - dequantized(encoded, divisor)) ** 2).sum() / (exact**2).sum())


def awkward(rng: np.random.Generator, rows: int, blocks: int) -> np.ndarray:
    """FP32 weights with the cases that packers get wrong: ties, zero blocks, -0.0, tiny blocks."""
    weights = rng.normal(0, 1, (rows, blocks * 16)).astype(np.float32)
    weights *= np.exp(rng.normal(0, 2, (rows, 1))).astype(np.float32)
    kind = rng.integers(0, 8, (rows, blocks))
    view = weights.reshape(rows, blocks, 16)
    view[kind == 0] = 0.0
    view[kind == 1] = -0.0
    view[kind == 2] *= np.float32(1e-6)
    ties = np.array([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * 2, np.float32)[:16]
    view[kind == 3] = ties * np.float32(2.0**-4) * rng.choice([-1, 1], 16).astype(np.float32)
    return weights


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 9), blocks=st.integers(1, 40))
def test_rtn_of_any_matrix_equals_compressed_tensors_bit_for_bit(
    reference_packer: Packer, seed: int, rows: int, blocks: int
) -> None:
    weights = awkward(np.random.default_rng(seed), rows, blocks)
    packed, scales, divisor = reference_packer(weights)

    encoded = encode(weights, "F32", divisor=divisor, mode=Mode.RTN, threads=1)

    assert divisor_of(float(np.abs(weights).max())) == divisor
    np.testing.assert_array_equal(encoded.scales, scales)
    np.testing.assert_array_equal(encoded.packed, packed)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_rtn_of_every_16_bit_pattern_equals_compressed_tensors(
    reference_packer: Packer, dtype: str
) -> None:
    every = np.arange(65536, dtype=np.uint32)
    as_float = (
        every.astype(np.uint16).view(np.float16).astype(np.float32)
        if dtype == "F16"
        else (every << 16).view(np.float32)
    )
    # BF16 reaches 3e38, whose squares no FP32 holds; weights of models end far below 1e4.
    kept = np.isfinite(as_float) & (np.abs(as_float) < 1e4)
    count = int(kept.sum()) // 16 * 16
    bits = every.astype(np.uint16)[kept][:count].reshape(1, -1)
    values = np.ascontiguousarray(as_float[kept][:count].reshape(1, -1))
    packed, scales, divisor = reference_packer(values)

    encoded = encode(bits, dtype, divisor=divisor, mode=Mode.RTN, threads=1)

    np.testing.assert_array_equal(encoded.scales, scales)
    np.testing.assert_array_equal(encoded.packed, packed)


def test_rtn_with_the_scale_of_a_fused_site_equals_compressed_tensors(
    reference_packer: Packer,
) -> None:
    weights = np.random.default_rng(3).normal(0, 0.02, (48, 160)).astype(np.float32)
    divisor = divisor_of(4 * float(np.abs(weights).max()))
    packed, scales, _ = reference_packer(weights, divisor)

    encoded = encode(weights, "F32", divisor=divisor, mode=Mode.RTN, threads=2)

    np.testing.assert_array_equal(encoded.scales, scales)
    np.testing.assert_array_equal(encoded.packed, packed)


def test_block_scale_codes_equal_ml_dtypes_over_the_whole_range() -> None:
    wanted = np.geomspace(2.0**-10, 448, 40_000, dtype=np.float32)
    steps = E4M3[1:]
    midpoints = (steps[1:] + steps[:-1]) / 2  # ties, exact in FP32
    amax = np.concatenate([wanted, steps, midpoints]) * np.float32(6)
    weights = np.zeros((amax.size, 16), np.float32)
    weights[:, 5] = amax

    encoded = encode(weights, "F32", divisor=np.float32(1), mode=Mode.RTN, threads=1)

    expected = (amax / np.float32(6)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    expected[expected == 0] = 0x20
    np.testing.assert_array_equal(encoded.scales[:, 0], expected)


def sweep_in_numpy(weights: np.ndarray, divisor: np.float32) -> np.ndarray:
    """Best scale codes by trying all 17 of the window in FP64, ties aside."""
    blocks = weights.reshape(-1, 16).astype(np.float64) * np.float64(divisor)
    base = encode(weights, "F32", divisor=divisor, mode=Mode.RTN, threads=1).scales.reshape(-1)
    errors = np.empty((17, base.size))
    for step in range(17):
        code = np.clip(base.astype(int) - 9 + step, 1, 126)
        scale = E4M3[code].astype(np.float64)[:, None]
        magnitude = np.minimum(np.abs(blocks) / scale, 6)
        nearest = np.abs(magnitude[..., None] - E2M1).argmin(-1)
        errors[step] = ((np.abs(blocks) - E2M1[nearest] * scale) ** 2).sum(-1)
    return errors


def test_fast_finds_the_smallest_error_of_the_whole_window() -> None:
    weights = awkward(np.random.default_rng(11), 40, 12)
    divisor = divisor_of(float(np.abs(weights).max()))
    errors = sweep_in_numpy(weights, divisor)

    encoded = encode(weights, "F32", divisor=divisor, mode=Mode.FAST, threads=1)

    scaled = dequantized(encoded, divisor) - weights.astype(np.float64)
    reached = ((scaled * np.float64(divisor)) ** 2).reshape(-1, 16).sum(-1)
    # FP32 sums decide between codes whose errors differ in the 6th digit: both are best.
    assert np.all(reached <= errors.min(0) * (1 + 1e-5) + 1e-9)


@pytest.mark.parametrize(
    ("mode", "low", "high"), [(Mode.FAST, 6.5e-3, 6.8e-3), (Mode.RTN, 8.8e-3, 9.2e-3)]
)
def test_relative_error_on_gaussian_weights_is_as_published(
    mode: Mode, low: float, high: float
) -> None:
    weights = np.random.default_rng(5).normal(0, 0.02, (1024, 2048)).astype(np.float32)
    divisor = divisor_of(float(np.abs(weights).max()))

    encoded = encode(weights, "F32", divisor=divisor, mode=mode, threads=2)

    exact = relative_mse(weights, encoded, divisor)
    assert low < exact < high
    assert encoded.squared_error / encoded.squared_weight == pytest.approx(exact, rel=1e-5)


@settings(max_examples=20, deadline=None)
@given(blocks=st.integers(1, 20_000), mode=st.sampled_from(list(Mode)))
def test_result_of_any_size_does_not_depend_on_the_threads(blocks: int, mode: Mode) -> None:
    weights = np.random.default_rng(blocks).normal(0, 1, (1, blocks * 16)).astype(np.float16)
    divisor = divisor_of(float(np.abs(weights).max()))

    one, many = (
        encode(weights, "F16", divisor=divisor, mode=mode, threads=threads) for threads in (1, 5)
    )

    np.testing.assert_array_equal(one.packed, many.packed)
    np.testing.assert_array_equal(one.scales, many.scales)
    assert (one.squared_error, one.squared_weight) == (many.squared_error, many.squared_weight)


def test_result_does_not_depend_on_the_instruction_set(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("c++")
    assert compiler, "a C++ compiler is needed to build the project at all"
    baseline = tmp_path / "baseline.so"
    sources = sorted((repository / "kernels/quantize").glob("*.cc"))
    flags = ("-std=c++17", "-O2", "-ffp-contract=off", "-DNVFP4_QUANT_BASELINE", "-shared", "-fPIC")
    subprocess.run([compiler, *flags, "-pthread", *sources, "-o", baseline], check=True)
    weights = awkward(np.random.default_rng(2), 64, 64)
    divisor = divisor_of(float(np.abs(weights).max()))

    def run() -> list[native.Encoded]:
        return [encode(weights, "F32", divisor=divisor, mode=mode, threads=2) for mode in Mode]

    shipped = run()
    native._library.cache_clear()
    monkeypatch.setattr(native, "LIBRARY", baseline)
    plain = run()
    native._library.cache_clear()

    for ours, theirs in zip(shipped, plain, strict=True):
        np.testing.assert_array_equal(ours.packed, theirs.packed)
        np.testing.assert_array_equal(ours.scales, theirs.scales)
        assert ours.squared_error == theirs.squared_error


def test_all_zero_matrix_gets_divisor_one_and_zero_codes() -> None:
    weights = np.zeros((3, 32), np.float32)
    divisor = divisor_of(0.0)

    encoded = encode(weights, "F32", divisor=divisor, mode=Mode.FAST, threads=1)

    assert divisor == 1.0
    assert set(encoded.scales.reshape(-1)) == {0x20}
    assert not encoded.packed.any()


def test_divisor_of_weights_below_fp32_reach_is_one() -> None:
    assert divisor_of(1e-37) == 1.0


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_scan_counts_what_is_not_finite_and_leaves_it_out(dtype: str) -> None:
    values = np.array([1.0, -3.0, np.nan, np.inf, -np.inf, 2.0], np.float32)
    stored = {
        "F16": values.astype(np.float16),
        "BF16": (values.view(np.uint32) >> 16).astype(np.uint16),
        "F32": values,
    }[dtype]

    found = scan(stored, dtype, threads=1)

    assert found == native.Range(amax=3.0, non_finite=3)


def test_scan_of_nothing_finds_zero() -> None:
    assert scan(np.empty(0, np.float32), "F32", threads=1) == native.Range(0.0, 0)


def test_encode_of_a_strided_array_is_refused() -> None:
    weights = np.zeros((32, 32), np.float32)[:, ::2]

    with pytest.raises(ValueError, match="contiguous"):
        encode(weights, "F32", divisor=np.float32(1), mode=Mode.RTN, threads=1)


def test_abi_refuses_a_count_that_is_no_multiple_of_16() -> None:
    weights = np.zeros(17, np.float32)
    out = np.zeros(32, np.uint8)
    sums = (ctypes.c_double * 2)()

    status = native._library().nvfp4_quant_encode(
        weights.ctypes.data, 2, 17, 1.0, 0, 1, out.ctypes.data, out.ctypes.data,
        ctypes.byref(sums, 0), ctypes.byref(sums, 8),
    )  # fmt: skip

    assert status == 1


def test_missing_library_names_the_command_that_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native._library.cache_clear()
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "absent.so")

    with pytest.raises(native.ApplianceError) as raised:
        scan(np.zeros(1, np.float32), "F32", threads=1)

    native._library.cache_clear()
    assert "LIBRARY_MISSING" in str(raised.value)
    assert "make native" in str(raised.value)


DENSE = [f"dense_ct_{shape}" for shape in ("1x16", "3x48", "5x160", "17x272", "33x1040", "64x128")]


@pytest.mark.parametrize(
    ("case", "module"),
    [*((case, "m") for case in DENSE), ("rounding_ties", "ct"), ("zero_tensor_ct", "m")],
)
def test_rtn_of_a_vectors_source_gives_its_bytes(
    repository: Path, tmp_path: Path, case: str, module: str
) -> None:
    vectors = repository.parent / "shared" / "vectors"
    if not vectors.exists():
        pytest.skip("no shared folder")
    shutil.copy(vectors / f"{case}.safetensors", tmp_path)
    stored = open_tensors(tmp_path)
    arrays = np.load(vectors / f"{case}.npz")
    divisor = stored.array(f"{module}.weight_global_scale")[0]
    packed = stored.array(f"{module}.weight_packed")
    source = arrays.get("source_fp32", np.zeros((packed.shape[0], packed.shape[1] * 2), np.float32))

    encoded = encode(source, "F32", divisor=divisor, mode=Mode.RTN, threads=1)

    np.testing.assert_array_equal(encoded.packed, packed)
    np.testing.assert_array_equal(encoded.scales, stored.array(f"{module}.weight_scale"))
