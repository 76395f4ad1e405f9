"""Every handed ModelOpt, compressed-tensors and group-128 matrix decodes to the exact bits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from appliance.nvfp4 import abi, block, e4m3, host
from appliance.nvfp4.library import LibraryError

if TYPE_CHECKING:
    from pathlib import Path

_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def test_vectors_as_parameters_cover_every_case(
    vectors: Path, every_linear: dict[str, Any]
) -> None:
    manifest = json.loads((vectors / "MANIFEST.json").read_text())
    cases = {case["name"] for case in manifest["cases"] if "safetensors" in str(case["files"])}
    good = {name["name"] for name in manifest["checkpoints"] if "dequant_fp32_sha256" in name}
    separate = {"bad_scale_negative", "bad_scale_nan", "zero_tensor_modelopt", "gemm_modelopt"}

    covered = {name.partition("/")[0] for name in every_linear}

    assert covered == (cases | good) - separate - {"mxfp4_modelopt"}


def test_oracle_on_every_vector_gives_the_exact_bits(linear: Any) -> None:
    scales = linear.scales
    values = e4m3.decode(scales) if scales.dtype == np.uint8 else scales.astype(np.float32)

    decoded = block.dequantize(
        linear.codes, values, linear.row_globals, is_divisor=linear.is_divisor
    )

    linear.assert_is(decoded)


def test_dequantize_source_on_every_vector_gives_the_exact_bits(linear: Any) -> None:
    out = np.empty((linear.codes.shape[0], linear.k), np.float32)

    host.dequantize(
        linear.codes, linear.scales, linear.row_globals, out, is_divisor=linear.is_divisor
    )

    linear.assert_is(out)


def test_packed_weight_on_every_vector_gives_the_exact_bits(linear: Any, on_host: Any) -> None:
    packed = on_host.pack(linear)

    linear.assert_is(on_host.dequantize(packed))


def test_matmul_with_unit_rows_on_every_vector_gives_the_weights(linear: Any, on_host: Any) -> None:
    packed = on_host.pack(linear)

    transposed = on_host.matmul(packed, np.eye(linear.k, dtype=np.float32))

    # + 0 makes -0 a plain zero: a sum of products with zeros has no negative zero.
    np.testing.assert_array_equal(transposed.T + 0, on_host.dequantize(packed) + 0)


def test_unscaled_fp16_of_all_codes_gives_the_exact_bits(
    vectors: Path, linears_in: Any, on_host: Any
) -> None:
    name = "codes_all_modelopt"
    tensors = linears_in(name)["m"]
    expected = np.load(vectors / f"{name}.npz")["m.unscaled_fp16_bits"]

    packed = on_host.pack(tensors)
    halves = on_host.dequantize(packed, dtype=np.float16, flags=abi.Dequantize.UNSCALED)

    np.testing.assert_array_equal(halves.view(np.uint16), expected)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("bad_scale_nan", abi.Status.ESCALE_NAN),
        ("bad_scale_negative", abi.Status.ESCALE_NEGATIVE),
    ],
)
def test_bad_scale_vectors_are_refused_with_coordinates(
    name: str, status: abi.Status, linears_in: Any, on_host: Any
) -> None:
    linear = linears_in(name)["m"]
    is_bad = ~e4m3.is_legal_scale(linear.scales)
    row, column = (int(index[0]) for index in np.nonzero(is_bad))
    out = np.full((linear.codes.shape[0], linear.k), 7, np.float32)

    with pytest.raises(LibraryError) as packed:
        on_host.pack(linear)
    with pytest.raises(LibraryError) as straight:
        host.dequantize(linear.codes, linear.scales, linear.row_globals, out)

    for refused in (packed.value, straight.value):
        assert refused.status == status
        assert f"row {row}, block {column} " in str(refused)
        assert refused.exit_code == 31
    assert (out == 7).all()


def test_zero_tensor_of_modelopt_is_refused_until_its_scales_are_cleaned(
    linears_in: Any, on_host: Any
) -> None:
    linear = linears_in("zero_tensor_modelopt")["m"]
    cleaned = type(linear)(linear.codes, linear.scales & 0, linear.row_globals, is_divisor=False)

    with pytest.raises(LibraryError, match="ESCALE_NAN"):
        on_host.pack(linear)

    assert not on_host.dequantize(on_host.pack(cleaned)).any()


@pytest.mark.parametrize("name", ["fused_modelopt", "fused_ct"])
@pytest.mark.parametrize("fused", ["qkv_proj", "gate_up_proj"])
def test_fused_parts_keep_their_own_globals(
    name: str, fused: str, vectors: Path, linears_in: Any, on_host: Any
) -> None:
    expected = np.load(vectors / f"{name}.npz")
    pieces = [linears_in(name)[part] for part in _PARTS[fused]]
    packed = on_host.create(_desc(pieces))
    report = abi.Report()
    on_host.library.report_reset(on_host.address(report))

    row = 0
    for piece in pieces:
        on_host.put(packed, piece, row_begin=row, report=on_host.address(report))
        row += piece.codes.shape[0]
    values = on_host.dequantize(packed)

    on_host.library.report_status(report, packed.handle)
    np.testing.assert_array_equal(values.view(np.uint32), expected[fused].view(np.uint32))
    wrong = expected[f"{fused}.WRONG_max_global"]
    assert np.abs(values - wrong).max() > 0.1 * np.abs(values).max()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_gemm_vector_with_sums_beyond_fp16_is_right(
    dtype: type, vectors: Path, linears_in: Any, on_host: Any
) -> None:
    expected = np.load(vectors / "gemm_modelopt.npz")
    x = expected["x_fp16"].astype(dtype)
    packed = on_host.pack(linears_in("gemm_modelopt")["m"])

    y = on_host.matmul(packed, x)

    rounding = np.abs(expected["y_fp64"]) * np.finfo(dtype).eps + np.finfo(dtype).tiny
    assert (np.abs(y - expected["y_fp64"]) <= rounding + 1e-6 * expected["abs_bound"]).all()


def _desc(pieces: list[Any]) -> abi.WeightDesc:
    kind = abi.GlobalKind.DIVISOR if pieces[0].is_divisor else abi.GlobalKind.MULTIPLIER
    return abi.WeightDesc(
        kind=abi.WeightKind.LINEAR,
        experts=1,
        n=sum(piece.codes.shape[0] for piece in pieces),
        k=pieces[0].k,
        group=pieces[0].group,
        scale_type=abi.Type.E4M3,
        global_kind=kind,
    )
