"""Which files make up a checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType

import pytest

from appliance.checkpoint.shards import INDEX_NAME, read_shards
from appliance.errors import ApplianceError, ExitCode

A, B = {"a": ("U8", (4,))}, {"b": ("U8", (8,))}


def codes_of(root: Path) -> tuple[int, list[str]]:
    with pytest.raises(ApplianceError) as caught:
        read_shards(root)
    return int(caught.value.exit_code), [fault.code for fault in caught.value.faults]


def index(root: Path, weight_map: object) -> None:
    (root / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def two(tmp_path: Path, hollow: ModuleType) -> Path:
    hollow.write_shard(tmp_path / "one.safetensors", A)
    hollow.write_shard(tmp_path / "two.safetensors", B)
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    return tmp_path


def test_index_and_shards_that_agree_are_read(two: Path) -> None:
    shards = read_shards(two)

    located = shards.locate()
    assert {name: file for name, (file, _) in located.items()} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
    }
    assert shards.spare == ()


def test_files_without_an_index_are_all_read(two: Path) -> None:
    (two / INDEX_NAME).unlink()

    assert sorted(read_shards(two).locate()) == ["a", "b"]


def test_file_the_index_does_not_name_is_spare(two: Path, hollow: ModuleType) -> None:
    hollow.write_shard(two / "consolidated.safetensors", A | B)

    shards = read_shards(two)

    assert shards.spare == ("consolidated.safetensors",)
    assert list(shards.headers) == ["one.safetensors", "two.safetensors"]


def test_shard_that_is_a_link_to_a_file_is_read(two: Path) -> None:
    (two / "blobs").mkdir()
    (two / "one.safetensors").rename(two / "blobs" / "0123")
    (two / "one.safetensors").symlink_to(Path("blobs") / "0123")

    assert "a" in read_shards(two).locate()


def test_missing_shard_is_named(two: Path) -> None:
    (two / "two.safetensors").unlink()

    assert codes_of(two) == (ExitCode.CHECKPOINT_UNSUPPORTED, ["E_MISSING_SHARD"])


def test_every_broken_shard_is_listed_at_once(two: Path) -> None:
    (two / "one.safetensors").write_bytes(b"")
    (two / "two.safetensors").unlink()

    assert codes_of(two) == (ExitCode.CHECKPOINT_CORRUPT, ["E_TRUNCATED", "E_MISSING_SHARD"])


def test_tensor_in_two_shards_is_refused(two: Path, hollow: ModuleType) -> None:
    hollow.write_shard(two / "two.safetensors", B | A)

    assert codes_of(two) == (ExitCode.CHECKPOINT_UNSUPPORTED, ["E_DUPLICATE_TENSOR"])


@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": "one.safetensors", "b": "two.safetensors", "ghost": "two.safetensors"},
        {"a": "two.safetensors", "b": "one.safetensors"},
        {"a": "one.safetensors", "c": "two.safetensors"},
    ],
    ids=["ghost tensor", "swapped", "unlisted tensor"],
)
def test_index_that_disagrees_with_the_shards_is_refused(
    two: Path, weight_map: dict[str, str]
) -> None:
    index(two, weight_map)

    exit_code, codes = codes_of(two)
    assert exit_code == ExitCode.CHECKPOINT_UNSUPPORTED
    assert set(codes) == {"E_INDEX_MISMATCH"}


@pytest.mark.parametrize(
    "file",
    [
        "../one.safetensors",
        "/etc/passwd",
        "sub/one.safetensors",
        "sub\\one.safetensors",
        ".one.safetensors",
        "one.bin",
        "one\u0000.safetensors",
        "",
        5,
        None,
        ["one.safetensors"],
    ],
    ids=repr,
)
def test_index_with_a_path_for_a_name_is_refused(two: Path, file: object) -> None:
    index(two, {"a": file, "b": "two.safetensors"})

    assert codes_of(two) == (ExitCode.CHECKPOINT_UNSUPPORTED, ["E_INDEX_MISMATCH"])


@pytest.mark.parametrize("weight_map", [None, [], {}, "one.safetensors"], ids=repr)
def test_index_without_a_map_is_refused(two: Path, weight_map: object) -> None:
    index(two, weight_map)

    assert codes_of(two)[1] == ["E_INDEX_MISMATCH"]


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "[" * 100_000], ids=lambda text: text[:4])
def test_index_that_is_no_object_is_refused(two: Path, text: str) -> None:
    (two / INDEX_NAME).write_text(text)

    assert codes_of(two) == (ExitCode.CHECKPOINT_UNSUPPORTED, ["E_CONFIG"])


def test_numbered_set_without_an_index_must_be_whole(tmp_path: Path, hollow: ModuleType) -> None:
    hollow.write_shard(tmp_path / "model-00002-of-00003.safetensors", A)

    assert codes_of(tmp_path)[1] == ["E_MISSING_SHARD", "E_MISSING_SHARD"]


@pytest.mark.parametrize(
    ("names", "code"),
    [
        ([], "E_MISSING_SHARD"),
        (["pytorch_model.bin"], "E_MISSING_SHARD"),
        (["model.gguf"], "E_MISSING_SHARD"),
        (["model.bin", "scales.bin"], "E_CONTAINER"),
        (["model.qsr"], "E_CONTAINER"),
    ],
    ids=str,
)
def test_directory_without_safetensors_is_refused(
    tmp_path: Path, names: list[str], code: str
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x")

    assert codes_of(tmp_path) == (ExitCode.CHECKPOINT_UNSUPPORTED, [code])


def test_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    file, container = tmp_path / "file", tmp_path / "container"
    file.write_bytes(b"text")
    container.write_bytes(b"\x1c\x0a\x0d\x0a rest")

    assert codes_of(file)[1] == ["E_PATH"]
    assert codes_of(container)[1] == ["E_CONTAINER"]
    assert codes_of(tmp_path / "absent")[1] == ["E_PATH"]


@pytest.mark.parametrize("name", ["\ud800.safetensors", "a\nb.safetensors", "\x1b[m.safetensors"])
def test_index_with_an_unprintable_file_name_is_refused(two: Path, name: str) -> None:
    index(two, {"a": name, "b": "two.safetensors"})

    assert codes_of(two) == (ExitCode.CHECKPOINT_UNSUPPORTED, ["E_INDEX_MISMATCH"])


@pytest.mark.parametrize("link", ["nowhere", INDEX_NAME])
def test_index_that_is_a_link_to_nowhere_is_no_absent_index(two: Path, link: str) -> None:
    (two / INDEX_NAME).unlink()
    (two / INDEX_NAME).symlink_to(link)

    assert codes_of(two)[0] == ExitCode.CHECKPOINT_UNSUPPORTED


def test_index_that_is_a_pipe_is_refused_without_waiting(two: Path) -> None:
    (two / INDEX_NAME).unlink()
    os.mkfifo(two / INDEX_NAME)

    assert codes_of(two) == (ExitCode.CHECKPOINT_UNSUPPORTED, ["E_UNREADABLE"])


def test_index_that_is_an_endless_device_is_refused(two: Path) -> None:
    (two / INDEX_NAME).unlink()
    (two / INDEX_NAME).symlink_to("/dev/zero")

    assert codes_of(two) == (ExitCode.CHECKPOINT_UNSUPPORTED, ["E_UNREADABLE"])
