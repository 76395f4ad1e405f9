"""Every tensor case of the handed vectors: values bit for bit, or exactly the expected code."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.checkpoint import decode
from appliance.checkpoint.decode import open_matrix
from appliance.checkpoint.gguf_nvfp4 import unpack_blocks
from appliance.checkpoint.stored import Layout, Stored, find_stored
from appliance.checkpoint.tensors import TensorReader
from appliance.errors import ApplianceError
from appliance.nvfp4 import block, e4m3, host

Case = dict[str, Any]
Open = Callable[[Path], TensorReader]


def sha256(array: np.ndarray) -> str:
    """Hash an array as the manifest does: its bytes in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def matrices(reader: TensorReader) -> list[Stored]:
    forms = {name: (reader.entry(name).dtype, reader.entry(name).shape) for name in reader.names()}
    return find_stored(forms)[0]


def decoded(reader: TensorReader, shape: list[int] | None = None) -> dict[str, np.ndarray]:
    logical = tuple(shape) if shape else None
    return {each.module: open_matrix(reader, each, logical).values() for each in matrices(reader)}


def test_case_has_the_files_that_the_manifest_hashed(case: Case, vectors: Path) -> None:
    found = {
        name: hashlib.sha256((vectors / name).read_bytes()).hexdigest() for name in case["sha256"]
    }

    assert found == case["sha256"]


@pytest.mark.parametrize("by_library", [True, False], ids=["library", "numpy"])
def test_case_decodes_bit_for_bit_or_is_refused(
    case: Case,
    vectors: Path,
    single_file: Open,
    by_library: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert decode.has_library()
    monkeypatch.setattr(decode, "has_library", lambda: by_library)
    if case["name"] == "gguf_nvfp4_blocks":
        stored = np.load(vectors / f"{case['name']}.npz")
        codes, scales = unpack_blocks(stored["blocks"][:, np.newaxis])
        values = block.dequantize(codes, e4m3.decode(scales))
        np.testing.assert_array_equal(values, stored["expected"])
        return
    reader = single_file(vectors / f"{case['name']}.safetensors")
    if "expect_error" in case:
        with pytest.raises(ApplianceError) as caught:
            decoded(reader)
        assert [fault.code for fault in caught.value.faults] == [case["expect_error"]]
        return

    values = decoded(reader, case.get("logical_shape"))

    assert values
    for module, array in values.items():
        if module in case["expected"]:
            dtype, shape, digest = case["expected"][module]
            assert (str(array.dtype), list(array.shape), sha256(array)) == (dtype, shape, digest)
        else:
            assert case["name"] == "gemm_modelopt"


def test_case_tells_zero_and_layout(case: Case, vectors: Path, single_file: Open) -> None:
    if "files" not in case or "expect_error" in case or case["name"] == "gguf_nvfp4_blocks":
        layouts, zeros = {Layout.MODELOPT}, 0
    else:
        reader = single_file(vectors / f"{case['name']}.safetensors")
        found = matrices(reader)
        layouts = {each.layout for each in found}
        zeros = sum(open_matrix(reader, each).zeros for each in found)

    expected = {
        "compressed-tensors": {Layout.COMPRESSED_TENSORS},
        "both": {Layout.COMPRESSED_TENSORS, Layout.MODELOPT},
        "mxfp4": {Layout.MXFP4},
        "modelopt-mixed": {Layout.FP8, Layout.MODELOPT},
    }.get(case.get("convention", ""), {Layout.MODELOPT})
    assert layouts == expected
    assert zeros == ("W_ZERO_TENSOR" in case.get("expect", ""))


def test_unscaled_products_are_exact_in_fp16(vectors: Path, single_file: Open) -> None:
    reader = single_file(vectors / "codes_all_modelopt.safetensors")
    expected = np.load(vectors / "codes_all_modelopt.npz")["m.unscaled_fp16_bits"]

    values = block.dequantize(reader.array("m.weight"), e4m3.decode(reader.array("m.weight_scale")))

    np.testing.assert_array_equal(values.astype(np.float16).view(np.uint16), expected)
    np.testing.assert_array_equal(values.astype(np.float16).astype(np.float32), values)


@pytest.mark.parametrize("name", ["fused_modelopt", "fused_ct"])
@pytest.mark.parametrize(
    ("site", "parts"),
    [("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))],
)
def test_fused_parts_keep_their_globals(
    vectors: Path, single_file: Open, name: str, site: str, parts: tuple[str, ...]
) -> None:
    expected = np.load(vectors / f"{name}.npz")

    values = decoded(single_file(vectors / f"{name}.safetensors"))

    fused = np.concatenate([values[part] for part in parts])
    np.testing.assert_array_equal(fused, expected[site])
    assert not np.array_equal(fused, expected[f"{site}.WRONG_max_global"])


def test_product_beyond_fp16_before_the_global_is_right(vectors: Path, single_file: Open) -> None:
    """The reference library accumulates in FP32: unscaled sums reach 363,289."""
    expected = np.load(vectors / "gemm_modelopt.npz")
    reader = single_file(vectors / "gemm_modelopt.safetensors")
    codes, scales = reader.array("m.weight"), reader.array("m.weight_scale")
    factor = np.full(len(codes), reader.float32("m.weight_scale_2"), np.float32)
    weight = np.empty((codes.shape[0], codes.shape[1] * 2), np.float32)

    host.dequantize(codes, scales, factor, weight)

    found = expected["x_fp16"].astype(np.float32) @ weight.T
    bound = expected["abs_bound"] * 2.0**-14
    assert (np.abs(found - expected["y_fp64"]) <= bound).all()
    unscaled = block.dequantize(codes, e4m3.decode(scales))
    sums = expected["x_fp16"].astype(np.float64) @ unscaled.astype(np.float64).T
    assert np.abs(sums).max() > 65504
