"""Mode `quasar-g128`: QUASAR-ST 1 as the reader knows it, and what it refuses."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.checkpoint.decode import open_matrix
from appliance.checkpoint.stored import Layout, find_stored
from appliance.checkpoint.tensors import open_tensors
from appliance.errors import ApplianceError
from appliance.quantize.job import Job, quantize
from appliance.quantize.native import encode_groups
from appliance.quantize.settings import settings_of

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


def run(source: Path, target: Path) -> dict[str, Any]:
    return quantize(Job(source, target, settings_of("quasar-g128", threads=1)), io.StringIO())


def nearest(values: np.ndarray, scale: float) -> np.ndarray:
    """The E2M1 values times a scale that are nearest, by trying every code."""
    grid = np.concatenate((-E2M1[::-1], E2M1)) * scale
    return grid[np.abs(values[:, None] - grid).argmin(1)]


def test_groups_of_a_gaussian_matrix_lose_what_the_format_must_lose() -> None:
    weights = np.random.default_rng(1).normal(0, 0.02, (512, 1024)).astype(np.float32)

    encoded = encode_groups(weights, group=128, threads=2)

    assert encoded is not None
    assert 1.0e-2 < encoded.squared_error / encoded.squared_weight < 1.1e-2


def test_groups_codes_are_the_nearest_under_their_scale() -> None:
    weights = np.random.default_rng(2).standard_t(4, (3, 256)).astype(np.float32)

    encoded = encode_groups(weights, group=128, threads=1)

    assert encoded is not None
    scales = encoded.scales.view(np.float16).astype(np.float64)
    packed = encoded.packed
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(3, 256)
    values = np.where(nibbles & 8, -1, 1) * E2M1[nibbles & 7] * np.repeat(scales, 128, axis=1)
    for row in range(3):
        for group in range(2):
            span = slice(128 * group, 128 * group + 128)
            np.testing.assert_allclose(
                values[row, span], nearest(weights[row, span].astype(float), scales[row, group])
            )
    assert encoded.squared_error == pytest.approx(np.square(values - weights).sum())


def test_groups_of_zeros_are_zero_and_of_huge_weights_do_not_fit() -> None:
    zeros = np.zeros((2, 128), np.float32)
    huge = np.full((1, 128), 1e6, np.float32)

    encoded = encode_groups(zeros, group=128, threads=1)

    assert encoded is not None
    assert not encoded.packed.any()
    assert not encoded.scales.any()
    assert encode_groups(huge, group=128, threads=1) is None


def test_quasar_checkpoint_is_read_back_as_quasar_st(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    files = make_model(width=128)
    source = files.write(tmp_path / "src")

    report = run(source, tmp_path / "dst")

    config = json.loads((tmp_path / "dst/config.json").read_text())["quantization_config"]
    assert config == {
        "quant_method": "nvfp4",
        "format": "quasar",
        "version": "1.0",
        "codebook": "e2m1",
        "group_size": 128,
        "scale_dtype": "float16",
        "block_shape": [1, 16, 16, 16],
        "ignore": ["lm_head"],
    }
    with open_tensors(tmp_path / "dst") as reader:
        forms = {n: (reader.entry(n).dtype, reader.entry(n).shape) for n in reader.names()}
        matrices, _ = find_stored(forms)
        assert len(matrices) == len(report["tensors"]) == 14
        assert {matrix.layout for matrix in matrices} == {Layout.QUASAR}
        name = "model.layers.0.mlp.down_proj"
        assert forms[f"{name}.qweight"] == ("I32", (128, 32))
        assert forms[f"{name}.weight_scales"] == ("F16", (128, 2))
        (stored,) = [matrix for matrix in matrices if matrix.module == name]
        values = open_matrix(reader, stored).values()
    with open_tensors(source) as reader:
        dense = reader.float32(f"{name}.weight")
    lost = float(np.square(values - dense).sum() / np.square(dense).sum())
    assert lost == pytest.approx(report["tensors"][name]["relative_mse"], rel=1e-3)
    assert lost < 1.2e-2


def test_quasar_of_a_width_that_is_no_multiple_of_128_names_the_mode_that_takes_it(
    llama: Any, tmp_path: Path
) -> None:
    source = llama.write(tmp_path / "src")  # 64 wide

    with pytest.raises(ApplianceError) as caught:
        run(source, tmp_path / "dst")

    assert caught.value.exit_code == 30
    fault = caught.value.faults[0]
    assert (fault.code, "--mode fast" in fault.fix) == ("QUANT_BLOCK", True)
    assert not (tmp_path / "dst.part").exists()


@pytest.mark.parametrize(
    ("value", "code", "exit_code"),
    [(np.nan, "QUANT_NOT_FINITE", 31), (5e5, "QUANT_SCALE_RANGE", 30)],
)
def test_quasar_of_weights_that_it_cannot_hold_is_refused(
    make_model: Callable[..., Any], tmp_path: Path, value: float, code: str, exit_code: int
) -> None:
    files = make_model(width=128)
    files.dtype = "F32"
    files.tensors["model.layers.1.mlp.up_proj.weight"][5, 7] = value
    source = files.write(tmp_path / "src")

    with pytest.raises(ApplianceError) as caught:
        run(source, tmp_path / "dst")

    assert caught.value.exit_code == exit_code
    assert caught.value.faults[0].code == code
    assert not (tmp_path / "dst").exists()
