"""The index of many shards: the largest real ones pass, and hostile ones keep the bound."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from appliance.checkpoint import weight_map
from appliance.checkpoint.document import parse_unique
from appliance.checkpoint.footprint import ROOM_BYTES, TIMES_THE_FILE

CHILD = Path(__file__).with_name("footprint_child.py")
KINDS = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
}


def experts_index(layers: int, experts: int, suffixes: tuple[str, ...]) -> dict[str, Any]:
    """Return the index of a mixture whose experts lie one by one in twenty shards."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.{suffix}"
        for layer in range(layers)
        for expert in range(experts)
        for part in ("gate", "up", "down")
        for suffix in suffixes
    ]
    places = {name: f"model-{i % 20 + 1:05}-of-00020.safetensors" for i, name in enumerate(names)}
    return {"metadata": {"total_size": 10**11}, "weight_map": places}


def read_in_child(path: Path) -> str:
    """Read an index in a process of its own, hold it to the bound, and return the refusal."""
    words = [sys.executable, str(CHILD), "index", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    [found] = json.loads(done.stdout)
    assert found["grown"] <= TIMES_THE_FILE * path.stat().st_size + ROOM_BYTES, found
    return found["refused"]


@pytest.mark.parametrize(
    ("layers", "experts", "kind", "indent"),
    [(94, 128, "modelopt", None), (48, 512, "modelopt", 2), (48, 512, "compressed-tensors", None)],
)
def test_index_of_a_real_mixture_passes_and_keeps_the_bound(
    tmp_path: Path, layers: int, experts: int, kind: str, indent: int | None
) -> None:
    table = experts_index(layers, experts, KINDS[kind])
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(table, indent=indent))

    assert read_in_child(path) == ""
    assert weight_map.parse_index(path.read_bytes()) == table


HOSTILE: dict[str, Callable[[int], str]] = {
    "short names": lambda i: f'"{i:07}":""',
    "a file each": lambda i: f'"name.{i:07}":"file.{i:07}"',
    "names with escapes": lambda i: f'"\\u0041{i:07}":"x"',
    "wide names": lambda i: f'"\U0001f600{i:07}":"x"',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_index_keeps_the_bound(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    pairs = ",".join(HOSTILE[name](i) for i in range(400_000))
    path.write_text('{"weight_map":{' + pairs + "}}")

    assert "of memory" in read_in_child(path)


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map":{}}',
        '{"weight_map":{"a":"b"},"metadata":{}}',
        ' { "x" : "weight_map" , "weight_map" : { "a" : "b" , "c" : "b" } } ',
        '{"metadata":{"weight_map":{"a":"b"}},"weight_map":{"c":"d"}}',
        '{"weight_map":{"a":1}}',
        '{"weight_map":{"a\\n":"b","c":"\\u00e9"}}',
        '{"weight_map":{"a":"b"},"note":"\\"weight_map\\":{"}',
        '{"weight_map":["a"]}',
        '{"weight_map":{"a":"\u00e9"}}',
        '["weight_map"]',
    ],
)
def test_index_is_what_json_says(text: str) -> None:
    assert weight_map.parse_index(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map":{"a":"b","a":"b"}}',
        '{"weight_map":{"a":"b"},"weight_map":{"c":"d"}}',
        '{"weight_map":{"a":"b",}}',
        '{"weight_map":{"a":"b"}',
        '{"weight_map":{"a":"b"}}}',
        '{"weight_map":{"a":"b""c":"d"}}',
        '{"weight_map":{"a\n":"b"}}',
        '{"weight_map":{"a":"b"} "c":1}',
    ],
)
def test_index_that_is_no_json_or_repeats_a_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        weight_map.parse_index(text.encode())


LETTERS = st.text(alphabet='ab"\\{}:, \n\u00e9', max_size=6)
VALUE = st.one_of(LETTERS, st.integers(0, 9), st.lists(LETTERS, max_size=2))
TABLE = st.dictionaries(
    st.sampled_from(["weight_map", "metadata", "a"]),
    st.one_of(st.dictionaries(LETTERS, VALUE, max_size=4), VALUE),
)


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)
@hypothesis.given(table=TABLE, indent=st.sampled_from([None, 1]), cut=st.integers(0, 3))
def test_index_is_read_as_any_other_document(table: Any, indent: int | None, cut: int) -> None:
    text = json.dumps(table, indent=indent, ensure_ascii=False)
    raw = text[: len(text) - cut].encode()
    try:
        wanted: object = parse_unique(raw)
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            weight_map.parse_index(raw)
    else:
        assert weight_map.parse_index(raw) == wanted
