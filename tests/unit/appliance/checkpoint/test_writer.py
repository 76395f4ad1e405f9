"""What the writer finishes the safetensors library reads; what it does not finish is not there."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from appliance.checkpoint.tensors import NUMPY_TYPES, open_tensors
from appliance.checkpoint.writer import (
    ShardWriter,
    TensorSpec,
    plan_shards,
    require_room,
    write_index,
    write_json,
)
from appliance.errors import ApplianceError, ExitCode

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
SPECS = st.lists(
    st.tuples(st.text(max_size=8), st.sampled_from(sorted(NUMPY_TYPES)), SHAPES),
    unique_by=lambda spec: spec[0],
    max_size=8,
)


@settings(max_examples=80, deadline=None)
@given(specs=SPECS, seed=st.integers(0, 1000))
def test_shard_of_any_tensors_reads_back_equal_and_aligned(
    specs: list[tuple[str, str, tuple[int, ...]]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    wanted = [TensorSpec(name, dtype, shape) for name, dtype, shape in specs if "__" not in name]
    arrays = {
        spec.name: rng.integers(0, 2, spec.nbytes, np.uint8)
        .view(NUMPY_TYPES[spec.dtype])
        .reshape(spec.shape)
        for spec in wanted
    }
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        with ShardWriter(root / "model.safetensors", wanted) as writer:
            for spec in reversed(wanted):
                writer.write(spec.name, arrays[spec.name])

        with open_tensors(root) as reader:
            assert set(reader.names()) == set(arrays)
            for spec in wanted:
                entry = reader.entry(spec.name)
                assert (entry.dtype, entry.shape) == (spec.dtype, spec.shape)
                assert entry.begin % NUMPY_TYPES[spec.dtype].itemsize == 0
                np.testing.assert_array_equal(reader.array(spec.name), arrays[spec.name])


def test_shard_is_read_by_the_safetensors_library(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    specs = [TensorSpec("codes", "U8", (3,)), TensorSpec("values", "F32", (3, 4))]

    with ShardWriter(tmp_path / "model.safetensors", specs) as writer:
        writer.write("codes", np.array([1, 2, 3], np.uint8))
        writer.write("values", values)

    loaded = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(loaded["values"], values)
    np.testing.assert_array_equal(loaded["codes"], [1, 2, 3])


def test_shard_that_fails_half_way_leaves_no_file(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "U8", (3,)), TensorSpec("b", "U8", (3,))]

    def write_two() -> None:
        with ShardWriter(tmp_path / "x.safetensors", specs) as writer:
            writer.write("a", np.zeros(3, np.uint8))
            writer.write("b", np.zeros(4, np.uint8))

    with pytest.raises(ValueError, match="expected"):
        write_two()

    assert list(tmp_path.iterdir()) == []


def test_shard_with_a_tensor_left_out_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "U8", (3,)), TensorSpec("b", "U8", (3,))]

    with (
        pytest.raises(ValueError, match="not written: b"),
        ShardWriter(tmp_path / "x.safetensors", specs) as writer,
    ):
        writer.write("a", np.zeros(3, np.uint8))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("array", [np.zeros(4, np.uint8), np.zeros(3, np.uint16)])
def test_write_of_an_array_that_does_not_fit_is_refused(tmp_path: Path, array: np.ndarray) -> None:
    with (
        pytest.raises(ValueError, match="expected"),
        ShardWriter(tmp_path / "x.safetensors", [TensorSpec("a", "U8", (3,))]) as writer,
    ):
        writer.write("a", array)


def test_write_of_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyError),
        ShardWriter(tmp_path / "x.safetensors", [TensorSpec("a", "U8", (3,))]) as writer,
    ):
        writer.write("b", np.zeros(3, np.uint8))


def test_shard_beyond_the_file_size_limit_says_disk_full_and_leaves_no_file(
    tmp_path: Path,
) -> None:
    script = (
        "import sys, pathlib\n"
        "from appliance.checkpoint.writer import ShardWriter, TensorSpec\n"
        "from appliance.errors import ApplianceError\n"
        "spec = TensorSpec('a', 'U8', (100_000,))\n"
        "try:\n"
        "    ShardWriter(pathlib.Path(sys.argv[1]) / 'x.safetensors', [spec]).__enter__()\n"
        "except ApplianceError as error:\n"
        "    print(int(error.exit_code), error)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )

    assert done.stdout.startswith("12 error[DISK_FULL]")
    assert list(tmp_path.iterdir()) == []


def test_require_room_refuses_more_than_is_free(tmp_path: Path) -> None:
    require_room(tmp_path / "not" / "there", 1)

    with pytest.raises(ApplianceError) as raised:
        require_room(tmp_path / "not" / "there", 2**62)

    assert raised.value.exit_code == ExitCode.CONTAINER
    assert raised.value.faults[0].code == "DISK_FULL"
    assert raised.value.faults[0].where == str(tmp_path)


def test_plan_shards_fills_files_in_order_up_to_the_limit() -> None:
    specs = [
        TensorSpec(name, "U8", (size,)) for name, size in zip("abcd", (4, 4, 9, 2), strict=True)
    ]

    plan = plan_shards(specs, limit_bytes=8)

    assert {shard: [spec.name for spec in group] for shard, group in plan.items()} == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d"],
    }


def test_plan_shards_that_fit_one_file_make_the_single_file(tmp_path: Path) -> None:
    plan = plan_shards([TensorSpec("a", "U8", (4,))], limit_bytes=8)

    write_index(tmp_path, plan)

    assert list(plan) == ["model.safetensors"]
    assert list(tmp_path.iterdir()) == []


def test_index_names_every_tensor_and_the_total(tmp_path: Path) -> None:
    plan = plan_shards([TensorSpec("b", "F32", (4,)), TensorSpec("a", "U8", (4,))], limit_bytes=16)

    write_index(tmp_path, plan)

    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 20},
        "weight_map": {
            "a": "model-00002-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
        },
    }


def test_json_with_half_a_surrogate_pair_is_written_escaped_and_reads_back(tmp_path: Path) -> None:
    value = {"name": "\ud800", "city": "Z\u00fcrich"}

    write_json(tmp_path / "config.json", value)

    assert json.loads((tmp_path / "config.json").read_text("utf-8")) == value


def test_json_keeps_letters_beyond_ascii_readable(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"city": "Z\u00fcrich"})

    assert "Z\u00fcrich" in (tmp_path / "config.json").read_text("utf-8")
