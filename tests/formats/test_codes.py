"""Codes that no handed vector has: each from a sound file with one thing wrong."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoint.container import HEADER
from appliance.checkpoint.inventory import require_drafter
from appliance.checkpoint.legacy import open_container
from appliance.checkpoint.read import summarize
from appliance.errors import ApplianceError

Edit = Callable[[str], Any]
Table = dict[str, Any]


def change(source: Path, target: Path, edit: Callable[[Table], None]) -> Path:
    """Write a container whose directory says something else; lengths and checksums fit."""
    content = source.read_bytes()
    fields = list(HEADER.unpack(content[: HEADER.size]))
    at, length, data = fields[5:8]
    table = json.loads(content[at : at + length])
    edit(table)
    raw = json.dumps(table, separators=(",", ":")).encode()
    begin = -(-(at + len(raw)) // 64) * 64
    body = content[data:]
    fields[6:9] = len(raw), begin, begin + len(body)
    fields[9] = zlib.crc32(raw)
    start = HEADER.pack(*fields)
    fields[10] = zlib.crc32(start[:52])
    start = HEADER.pack(*fields)
    target.write_bytes(start + raw + bytes(begin - at - len(raw)) + body)
    return target


def segment(table: Table, tensor: int = 0) -> Table:
    return next(iter(table["tensors"][tensor]["segments"].values()))


def shifted(table: Table) -> None:
    segment(table)["offset"] += 4


def beyond(table: Table) -> None:
    segment(table, -1)["offset"] += 1 << 20


def over_another(table: Table) -> None:
    parts = list(table["tensors"][0]["segments"].values())
    parts[1]["offset"] = parts[0]["offset"]


def named(name: str) -> Callable[[Table], None]:
    return lambda table: table["tensors"][0].update(name=name)


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (shifted, "E_SEGMENT_ALIGN"),
        (beyond, "E_SEGMENT_BOUNDS"),
        (over_another, "E_SEGMENT_OVERLAP"),
        (named("a..b"), "E_NAME"),
        (named("../a"), "E_NAME"),
        (lambda table: table.update(version="2.0"), "E_VERSION"),
        (lambda table: segment(table).update(dtype="F64"), "E_DTYPE"),
    ],
    ids=["shifted", "beyond", "over-another", "no-component", "path", "version", "type"],
)
def test_container_with_one_thing_wrong_has_its_code(
    vectors: Path, tmp_path: Path, edit: Callable[[Table], None], code: str
) -> None:
    sound = vectors / "quasar" / "ok_v1.bin"
    open_container(change(sound, tmp_path / "same.qsr", lambda _: None))

    with pytest.raises(ApplianceError) as caught:
        open_container(change(sound, tmp_path / "model.qsr", edit))

    assert [fault.code for fault in caught.value.faults] == [code]


@pytest.mark.parametrize(
    ("at", "code", "exit_code"),
    [(12, "E_HEADER_CRC", 31), (48, "E_HEADER_CRC", 31), (70, "E_DIR_CRC", 31)],
)
def test_container_with_a_flipped_bit_has_the_code_of_its_place(
    vectors: Path, tmp_path: Path, at: int, code: str, exit_code: int
) -> None:
    content = bytearray((vectors / "quasar" / "ok_v1.bin").read_bytes())
    content[at] ^= 2
    (tmp_path / "model.qsr").write_bytes(content)

    with pytest.raises(ApplianceError) as caught:
        open_container(tmp_path / "model.qsr")

    assert (caught.value.faults[0].code, int(caught.value.exit_code)) == (code, exit_code)


@pytest.mark.parametrize(("shape", "is_noted"), [([1, 16, 16, 16], False), ([1, 32, 32, 1], True)])
def test_other_block_shape_is_noted(edit: Edit, shape: list[int], is_noted: bool) -> None:
    made = edit("ok_ct_w4a16")
    made.quantization["block_shape"] = shape

    notes = summarize(made.write()).notes

    assert any(note.startswith("W_BLOCK_SHAPE") for note in notes) == is_noted


@pytest.mark.parametrize("method", ["mtp", "qwen3_next_mtp", "deepseek_mtp"])
def test_speculation_without_its_layers_is_refused(method: str) -> None:
    names = ["model.embed_tokens", "model.layers.0.self_attn.q_proj", "lm_head"]

    with pytest.raises(ApplianceError, match=rf"E_MTP_ABSENT. speculative-config {method}"):
        require_drafter(method, names)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("", "lm_head"),
        ("ngram", "lm_head"),
        ("mtp", "mtp.layers.0.mlp.up_proj"),
        ("mtp", "model.language_model.mtp.fc"),
        ("deepseek_mtp", "model.layers.61.eh_proj"),
    ],
)
def test_speculation_with_its_layers_or_of_another_kind_passes(method: str, name: str) -> None:
    require_drafter(method, [name])
