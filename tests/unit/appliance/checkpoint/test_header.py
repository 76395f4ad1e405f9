"""Headers of good, broken and hostile safetensors files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.checkpoint.header import HEADER_BYTES_MAX, HeaderError, StoredTensor, read_header

U8 = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
ENTRY = json.dumps(U8).encode()


def raw_file(path: Path, header: bytes, data: bytes = b"", *, length: int | None = None) -> Path:
    stated = len(header) if length is None else length
    path.write_bytes(stated.to_bytes(8, "little") + header + data)
    return path


def table(path: Path, header: object, data: int) -> Path:
    return raw_file(path, json.dumps(header).encode(), bytes(data))


def code_of(path: Path) -> str:
    with pytest.raises(HeaderError) as caught:
        read_header(path)
    return caught.value.code


def test_header_of_good_file_gives_forms_and_places(tmp_path: Path, hollow: ModuleType) -> None:
    path = tmp_path / "good.safetensors"
    hollow.write_shard(path, {"b": ("F32", (2, 3)), "a": ("U8", (5,)), "one": ("F32", ())})

    header = read_header(path)

    start = 8 + len(header.raw)
    assert header.forms == {"b": ("F32", (2, 3)), "a": ("U8", (5,)), "one": ("F32", ())}
    assert header.tensors["a"] == StoredTensor("U8", (5,), start + 24, start + 29)
    assert header.file_bytes == start + 33 == path.stat().st_size


def test_header_without_tensors_is_read(tmp_path: Path) -> None:
    header = read_header(table(tmp_path / "x", {"__metadata__": {"format": "pt"}}, 0))

    assert header.forms == {}


def test_header_with_tensors_out_of_order_is_read(tmp_path: Path) -> None:
    entries = {"a": U8 | {"data_offsets": [4, 8]}, "b": U8}

    header = read_header(table(tmp_path / "x", entries, 8))

    assert header.tensors["a"].begin == header.tensors["b"].end


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "E_TRUNCATED"),
        (b"\x10\0\0", "E_TRUNCATED"),
        (bytes(64), "E_BAD_HEADER"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "E_LFS_POINTER"),
        ((1000).to_bytes(8, "little") + b"{}", "E_TRUNCATED"),
        ((HEADER_BYTES_MAX + 1).to_bytes(8, "little") + b"{}", "E_BAD_HEADER"),
        ((2**64 - 1).to_bytes(8, "little") + b"{}", "E_BAD_HEADER"),
        ((2).to_bytes(8, "little") + b"[]", "E_BAD_HEADER"),
        ((4).to_bytes(8, "little") + b"null", "E_BAD_HEADER"),
        ((4).to_bytes(8, "little") + b"{\xff\xfe}", "E_BAD_HEADER"),
        ((5).to_bytes(8, "little") + b'{"a":', "E_BAD_HEADER"),
    ],
    ids=[
        "empty",
        "three bytes",
        "zeros",
        "pointer",
        "cut header",
        "long header",
        "huge length",
        "list",
        "null",
        "not UTF-8",
        "cut JSON",
    ],
)
def test_file_that_is_no_safetensors_gives_its_code(
    tmp_path: Path, content: bytes, code: str
) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)

    assert code_of(path) == code


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "U8", "shape": [4]},
        {"dtype": "U9", "shape": [4], "data_offsets": [0, 4]},
        {"dtype": ["U8"], "shape": [4], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": 4, "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [4.0], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [True, 4], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": ["x" * 9, 10**9], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [-2, -2], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [1] * 9, "data_offsets": [0, 1]},
        {"dtype": "U8", "shape": [5], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]},
        {"dtype": "U8", "shape": [4], "data_offsets": [0.0, 4.0]},
        {"dtype": "U8", "shape": [4], "data_offsets": [0]},
        {"dtype": "U8", "shape": [4], "data_offsets": "04"},
        {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]},
        ["U8", [4], [0, 4]],
        7,
    ],
    ids=json.dumps,
)
def test_malformed_entry_is_refused(tmp_path: Path, entry: object) -> None:
    assert code_of(table(tmp_path / "x", {"t": entry}, 4)) == "E_BAD_HEADER"


def test_boolean_size_is_refused_after_an_equal_integer(tmp_path: Path) -> None:
    good = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    late = {"dtype": "U8", "shape": [4], "data_offsets": [4.0, 8]}

    assert code_of(table(tmp_path / "x", {"a": good, "b": late}, 8)) == "E_BAD_HEADER"


@pytest.mark.parametrize("places", [([0, 4], [3, 7]), ([0, 4], [5, 9]), ([0, 4], [0, 4])], ids=str)
def test_overlap_or_gap_is_refused(tmp_path: Path, places: tuple[list[int], list[int]]) -> None:
    entries = {name: U8 | {"data_offsets": at} for name, at in zip("ab", places, strict=True)}

    assert code_of(table(tmp_path / "x", entries, places[1][1])) == "E_BAD_HEADER"


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":%b,"a":%b}' % (ENTRY, ENTRY),
        b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,2],"data_offsets":[0,4]}}',
    ],
    ids=["tensor", "dtype", "offsets"],
)
def test_repeated_key_is_refused(tmp_path: Path, header: bytes) -> None:
    path = raw_file(tmp_path / "x", header, bytes(4))

    with pytest.raises(HeaderError, match="twice"):
        read_header(path)


def test_deeply_nested_header_is_refused(tmp_path: Path) -> None:
    header = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"

    assert code_of(raw_file(tmp_path / "x", header)) == "E_BAD_HEADER"


def test_number_of_many_digits_is_refused(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"U8","shape":[' + b"9" * 100_000 + b'],"data_offsets":[0,4]}}'

    assert code_of(raw_file(tmp_path / "x", header, bytes(4))) == "E_BAD_HEADER"


def test_metadata_that_is_no_object_is_refused(tmp_path: Path) -> None:
    assert code_of(table(tmp_path / "x", {"__metadata__": []}, 0)) == "E_BAD_HEADER"


def test_metadata_that_mentions_data_offsets_is_harmless(tmp_path: Path) -> None:
    entries = {"__metadata__": {"note": '"dtype" "data_offsets"'}, "a": U8}

    assert list(read_header(table(tmp_path / "x", entries, 4)).forms) == ["a"]


@pytest.mark.parametrize(("data", "code"), [(3, "E_TRUNCATED"), (5, "E_TRAILING")])
def test_file_of_another_length_gives_its_code(tmp_path: Path, data: int, code: str) -> None:
    assert code_of(table(tmp_path / "x", {"a": U8}, data)) == code


def test_missing_file_is_a_missing_shard(tmp_path: Path) -> None:
    assert code_of(tmp_path / "absent") == "E_MISSING_SHARD"


def test_directory_and_pipe_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    assert code_of(tmp_path) == "E_UNREADABLE"
    assert code_of(tmp_path / "pipe") == "E_UNREADABLE"


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 140), byte=st.integers(0, 255), cut=st.integers(0, 200))
def test_damaged_file_never_ends_in_another_error(
    tmp_path: Path, hollow: ModuleType, position: int, byte: int, cut: int
) -> None:
    path = tmp_path / "x"
    hollow.write_shard(path, {"a": ("U8", (4,)), "b": ("F32", (2,))})
    content = bytearray(path.read_bytes())
    content[position % len(content)] = byte
    path.write_bytes(bytes(content[: max(cut, 1)] if cut < len(content) else content))

    try:
        header = read_header(path)
    except HeaderError:
        return

    assert sum(end - begin for begin, end in header.extents) == header.file_bytes - 8 - len(
        header.raw
    )


def test_name_with_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    assert code_of(table(tmp_path / "a", {"\ud800": U8}, 4)) == "E_BAD_HEADER"


def test_name_with_an_escaped_letter_is_kept(tmp_path: Path) -> None:
    assert list(read_header(table(tmp_path / "a", {"\u00fc": U8}, 4)).forms) == ["\u00fc"]
