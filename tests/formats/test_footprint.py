"""No JSON of a checkpoint takes more than four times its file and 8 MiB, whatever it holds."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from appliance.checkpoint.container import HEADER
from appliance.checkpoint.document import parse_unique, read_document
from appliance.checkpoint.footprint import (
    ROOM_BYTES,
    TIMES_THE_FILE,
    Sharer,
    require_footprint,
)
from appliance.checkpoint.header import read_header

CHILD = Path(__file__).with_name("footprint_child.py")
MIB = 1024**2
KIB = 1024

NAMES = ["model.layers.{}.mlp.experts.{}.down_proj.weight_scale_2", "model-{:05}-of-00030.st"]


def many(piece: str, size: int) -> str:
    """Return a piece joined by commas, `@` in it a number of its own, of about so many bytes."""
    count = size // (len(piece.encode()) + 1 + 8 * piece.count("@")) + 1
    form = piece.replace("%", "%%").replace("@", "%(i)09d")
    return ",".join([form % {"i": i} for i in range(count)])


def listed(piece: str) -> Callable[[int], str]:
    return lambda size: '{"a":[' + many(piece, size) + "]}"


Case = tuple[int, Callable[[int], str]]
"""KiB of about the largest text that is let through, and how to make such text."""

DOCUMENTS: dict[str, Case] = {
    "lists": (195, listed("[]")),
    "nested lists": (1100, listed("[[[1.5]]]" + " " * 30)),
    "objects": (420, listed('{"@":1}')),
    "equal objects of objects": (500, listed('{"key":{}}')),
    "equal objects of many keys": (
        *(2500, listed("{" + ",".join(f'"key{i}":null' for i in range(17)) + "}")),
    ),
    "objects, each twice": (550, listed('{"@":1},{"@":1}')),
    "keys": (560, lambda size: "{" + many('"@":1', size) + "}"),
    "texts": (1600, listed('"@"')),
    "numbers": (3200, listed("1@")),
    "one wide letter": (1900, lambda size: '{"a":"' + "x" * size + '\U0001f600"}'),
    "wide texts": (1100, listed('"01234567890@\U0001f600"')),
    "one escape": (1500, lambda size: '{"a":"' + "x" * size + '\\ud83d\\ude00"}'),
    "escapes": (1100, listed('"01234567890@\\ud83d\\ude00"')),
}


def header(entries: str) -> bytes:
    raw = f"{{{entries}}}".encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


EMPTY = '"dtype":"U8","shape":[0],"data_offsets":[0,0]'
OWN_SHAPE = EMPTY.replace("[0]", "[0,1@]")
HEADERS: dict[str, Case] = {
    "empty tensors": (480, lambda size: many('"model.layers.@.q":{' + EMPTY + "}", size)),
    "shapes of their own": (480, lambda size: many('"model.@":{' + OWN_SHAPE + "}", size)),
    "one long shape": (2200, lambda size: '"a":{"dtype":"U8","shape":[' + many("1@", size) + "]}"),
    "metadata": (880, lambda size: '"__metadata__":{' + many('"k@":"v:@"', size) + "}"),
}


def read_in_child(kind: str, *paths: Path) -> list[str]:
    """Read files in a process of its own, hold each to the bound, and return the refusals."""
    words = [sys.executable, str(CHILD), kind, *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    for path, each in zip(paths, found, strict=True):
        assert each["grown"] <= TIMES_THE_FILE * path.stat().st_size + ROOM_BYTES, each
    return [each["refused"] for each in found]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_hostile_document_keeps_the_bound(tmp_path: Path, name: str) -> None:
    size, make = DOCUMENTS[name]
    small, large = tmp_path / "small.json", tmp_path / "large.json"
    small.write_text(make(size * KIB * 9 // 10))
    large.write_text(make(size * KIB * 2))

    refused = read_in_child("document", small, large)

    assert not refused[0]
    assert "of memory" in refused[1]


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_header_keeps_the_bound(tmp_path: Path, name: str) -> None:
    size, make = HEADERS[name]
    small, large = tmp_path / "small.safetensors", tmp_path / "large.safetensors"
    small.write_bytes(header(make(size * KIB * 9 // 10)))
    large.write_bytes(header(make(size * KIB * 2)))

    refused = read_in_child("header", small, large)

    assert "of memory" not in refused[0]
    assert "of memory" in refused[1]


def test_key_twice_and_text_without_end_keep_the_bound(tmp_path: Path) -> None:
    twice, endless = tmp_path / "twice.json", tmp_path / "endless.json"
    twice.write_text("{" + many('"key number @":"value @"', 1700 * KIB) + ',"b":1,"b":1}')
    endless.write_text('{"a":"' + '\\"' * MIB)

    refused = read_in_child("document", twice, endless)

    assert "a key occurs twice" in refused[0]
    assert "E_CONFIG" in refused[1]


def test_hostile_directory_of_a_container_keeps_the_bound(tmp_path: Path) -> None:
    segment = '{"dtype":"U8","shape":[0],"offset":0,"nbytes":0,"crc32":0}'
    tensor = '{"name":"t@","kind":"dense","shape":[0],"segments":{"data":' + segment + "}}"
    raw = f'{{"format":"quasar","version":"1.0","tensors":[{many(tensor, 3 * MIB)}]}}'.encode()
    data = -(-(64 + len(raw)) // 64) * 64
    start = HEADER.pack(
        *(b"\x1c\x0a\x0d\x0a", 0xFFFFFFFF, 1, 0, 1, 64, len(raw), data, data),
        *(zlib.crc32(raw), 0, bytes(8)),
    )
    start = start[:52] + struct.pack("<I", zlib.crc32(start[:52])) + start[56:]
    path = tmp_path / "model.qsr"
    path.write_bytes(start + raw + bytes(data - 64 - len(raw)))

    assert "of memory" in read_in_child("container", path)[0]


@pytest.fixture(scope="module")
def index() -> bytes:
    """Return an index of 100,000 tensors in 30 files, as exporters write it."""
    places = {NAMES[0].format(i // 2000, i % 2000): NAMES[1].format(i % 30) for i in range(100_000)}
    table = {"metadata": {"total_size": 10**11}, "weight_map": places}
    return json.dumps(table, indent=2).encode()


def test_index_of_a_hundred_thousand_tensors_passes(tmp_path: Path, index: bytes) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(index)

    assert read_in_child("document", path) == [""]


def test_check_takes_less_time_than_the_parse(index: bytes) -> None:
    def seconds(work: Callable[[], object]) -> float:
        begun = time.process_time()
        work()
        return time.process_time() - begun

    checks = [seconds(lambda: require_footprint(index, len(index))) for _ in range(3)]

    assert min(checks) < min(seconds(lambda: json.loads(index)) for _ in range(3))


@pytest.mark.parametrize("root", ["model", "language_model.model"])
@pytest.mark.parametrize("indent", [None, 1, 4])
@pytest.mark.parametrize(("layers", "experts"), [(94, 128), (48, 512), (1, 13), (61, 768)])
def test_scheme_of_each_expert_passes(
    tmp_path: Path, layers: int, experts: int, indent: int | None, root: str
) -> None:
    """Modules of mixed precision, each with a scheme of its own text, as exporters list them."""
    schemes = {
        f"{root}.layers.{layer}.mlp.experts.{expert}.{part}": {
            "quant_algo": "NVFP4" if part == "up_proj" else "FP8",
            "group_size": 16,
        }
        for layer in range(layers)
        for expert in range(experts)
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    path = tmp_path / "hf_quant_config.json"
    table = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": schemes}}
    separators = (",", ":") if indent is None else None
    path.write_text(json.dumps(table, indent=indent, separators=separators))

    (tmp_path / "config.json").write_text("{}")

    assert read_in_child("rules", path) == [""]
    assert read_document(path) == table


def test_equal_objects_pass_however_many(tmp_path: Path) -> None:
    path = tmp_path / "many.json"
    path.write_text(listed('{"key":null}')(6 * MIB))

    assert read_in_child("document", path) == [""]


def test_objects_that_are_alike_keep_their_types() -> None:
    texts = ["1", "true", "1.0", "0.0", "-0.0", "0", "false", "null", '"1"', "-1", "{}", "[]"]
    raw = "[" + ",".join(f'{{"a":{text}}}' for text in texts * 2) + "]"

    assert repr(parse_unique(raw.encode())) == repr(json.loads(raw))


def test_template_full_of_marks_passes() -> None:
    template = "{% for m in messages %}{{ m['content'] }}, [x]: {{ y }}{% endfor %}" * 40_000

    value = parse_unique(json.dumps({"chat_template": template}).encode())

    assert value == {"chat_template": template}


def test_key_with_a_colon_is_no_key_twice(tmp_path: Path) -> None:
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    table = {"__metadata__": {"url": "https://a:1"}, "a:b": entry}
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(json.dumps(table)[1:-1]))

    assert list(read_header(path).forms) == ["a:b"]


@pytest.mark.parametrize(
    "text",
    ['{"a":1,"a":2}', '{"b":{"x":[{"a":1,"a":{}}]}}', '{"a":":","a":"::"}', r'{"\"a":1,"\"a":2}'],
)
def test_key_twice_is_found_at_any_depth(text: str) -> None:
    with pytest.raises(ValueError, match="occurs twice"):
        parse_unique(text.encode())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.text(max_size=12), inner),
    max_leaves=60,
)


@hypothesis.settings(max_examples=24, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    value=VALUES,
    copies=st.integers(1, 300),
    is_ascii=st.booleans(),
    is_shared=st.booleans(),
    is_numbered=st.booleans(),
)
def test_parse_takes_no_more_than_was_added_up(
    value: Any, copies: int, is_ascii: bool, is_shared: bool, is_numbered: bool
) -> None:
    values = [[{"n": i, "value": 0}, value] if is_numbered else value for i in range(copies)]
    raw = json.dumps(values, ensure_ascii=is_ascii).encode(errors="replace")
    least = smallest(raw, is_shared=is_shared)
    tracemalloc.start()
    try:
        found = json.loads(raw.decode(), object_hook=Sharer() if is_shared else None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert found == json.loads(raw)
    assert peak <= TIMES_THE_FILE * least + ROOM_BYTES + 4096


def smallest(raw: bytes, *, is_shared: bool) -> int:
    """Return the least size of a file, below zero too, that the text may be of."""
    low, high = -ROOM_BYTES // TIMES_THE_FILE, len(raw) * 100 + 10_000
    while low < high:
        middle = (low + high) // 2
        try:
            require_footprint(raw, middle, is_shared=is_shared)
            high = middle
        except ValueError:
            low = middle + 1
    return low
