"""The numpy reader against the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from appliance.checkpoint.tensors import NUMPY_TYPES, open_tensors
from appliance.errors import ApplianceError, ExitCode


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.uint8, np.int8, np.int16, np.float16, np.int32, np.float32, np.int64]
)
def test_array_of_a_numpy_type_equals_what_the_library_wrote(
    tmp_path: Path, dtype: type[np.generic]
) -> None:
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    save_file({"x": values}, tmp_path / "model.safetensors")

    with open_tensors(tmp_path) as reader:
        found = reader.array("x")

        assert found.dtype == values.dtype
        np.testing.assert_array_equal(found, values)
        assert not found.flags.writeable


@pytest.mark.parametrize(
    "kind", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
)
def test_array_of_a_type_that_numpy_lacks_is_its_bits(
    tmp_path: Path, kind: type[np.generic]
) -> None:
    values = np.array([[0.5, -1.0, 2.0, -0.0]], kind)
    save_file({"x": values}, tmp_path / "model.safetensors")

    with open_tensors(tmp_path) as reader:
        np.testing.assert_array_equal(reader.array("x"), values.view(f"uint{8 * values.itemsize}"))


def test_float32_of_bfloat16_is_exact(tmp_path: Path) -> None:
    values = np.array([1.5, -3e38, 1e-40, 0.0], ml_dtypes.bfloat16)
    save_file({"x": values}, tmp_path / "model.safetensors")

    with open_tensors(tmp_path) as reader:
        np.testing.assert_array_equal(reader.float32("x"), values.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_float32_of_a_float_converts_its_values(tmp_path: Path, dtype: type[np.generic]) -> None:
    values = np.array([[0.1, -7.0]], dtype)
    save_file({"x": values}, tmp_path / "model.safetensors")

    with open_tensors(tmp_path) as reader:
        np.testing.assert_array_equal(reader.float32("x"), values.astype(np.float32))


def test_float32_of_packed_codes_is_refused(tmp_path: Path) -> None:
    save_file({"x": np.zeros(4, np.uint8)}, tmp_path / "model.safetensors")

    with open_tensors(tmp_path) as reader, pytest.raises(ApplianceError) as raised:
        reader.float32("x")

    assert raised.value.faults[0].code == "E_DTYPE"


def test_scalars_and_empty_tensors_keep_their_shape(tmp_path: Path) -> None:
    save_file(
        {"scalar": np.array(3, np.float32), "none": np.zeros((0, 5), np.float16)},
        tmp_path / "model.safetensors",
    )

    with open_tensors(tmp_path) as reader:
        assert reader.array("scalar").shape == ()
        assert reader.array("scalar") == 3
        assert reader.array("none").shape == (0, 5)


def test_reader_of_shards_lists_each_file_in_file_order(tmp_path: Path) -> None:
    save_file({"b": np.ones(2, np.float32), "a": np.zeros(3, np.int8)}, tmp_path / "1.safetensors")
    save_file({"c": np.full(4, 7, np.int16)}, tmp_path / "2.safetensors")
    weight_map = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    with open_tensors(tmp_path) as reader:
        assert reader.shards == ("1.safetensors", "2.safetensors")
        assert set(reader.names()) == {"a", "b", "c"}
        assert reader.in_shard("1.safetensors")[0].begin < reader.in_shard("1.safetensors")[1].begin
        assert "c" in reader
        assert "d" not in reader
        np.testing.assert_array_equal(reader.array("c"), [7, 7, 7, 7])


def test_array_after_release_reads_the_same_again(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    save_file({"a": values, "b": values}, tmp_path / "model.safetensors")

    with open_tensors(tmp_path) as reader:
        found = reader.array("b")
        reader.release("b")

        np.testing.assert_array_equal(found, values)


def test_array_outlives_the_reader(tmp_path: Path) -> None:
    save_file({"x": np.arange(9)}, tmp_path / "model.safetensors")

    with open_tensors(tmp_path) as reader:
        found = reader.array("x")

    np.testing.assert_array_equal(found, np.arange(9))


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file({"x": np.arange(9)}, tmp_path / "model.safetensors")

    with open_tensors(tmp_path) as reader, pytest.raises(ApplianceError) as raised:
        reader.array("y")

    assert raised.value.faults[0].code == "E_MISSING_TENSOR"
    assert raised.value.exit_code == ExitCode.CHECKPOINT_UNSUPPORTED


def test_type_without_a_numpy_counterpart_is_refused(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    content = len(header).to_bytes(8, "little") + header + b"\x00\x00"
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(ApplianceError) as raised:
        open_tensors(tmp_path)

    assert raised.value.faults[0].code == "E_DTYPE"
    assert "F4" not in NUMPY_TYPES
