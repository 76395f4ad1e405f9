"""Files that are sound and odd, and such that claim sizes that no array can have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.checkpoint.decode import Matrix
from appliance.checkpoint.header import HeaderError, read_header
from appliance.checkpoint.identity import identify
from appliance.checkpoint.segments import are_sizes
from appliance.checkpoint.stored import Layout, Stored
from appliance.convert.job import Job, convert
from appliance.convert.target import Target
from appliance.errors import ApplianceError

Edit = Callable[[str], Any]

SOUND = ["ok_modelopt_mixed_fp8", "ok_ct_w4a4", "ok_quasar_st_f16", "ok_quasar_st_f32"]


def shift(path: Path, spaces: int) -> None:
    """Write a safetensors file again with so many more spaces at the end of its header."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length] + b" " * spaces
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("spaces", [1, 2, 3])
def test_tensors_at_odd_places_have_the_same_values(
    edit: Edit, tmp_path: Path, name: str, spaces: int
) -> None:
    root = edit(name).write()
    expected = identify(root)

    shift(root / "model.safetensors", spaces)
    convert(Job(root, tmp_path / "fp16", Target.FP16))

    assert identify(root) == expected


@pytest.mark.parametrize(
    "shape", [[0, 2**70], [2**62, 0, 2**62], [2**48, 2, 0], [0, *[2**40] * 7]], ids=str
)
def test_empty_tensors_of_impossible_sizes_are_refused(tmp_path: Path, shape: list[int]) -> None:
    path = tmp_path / "model.safetensors"
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    header = json.dumps({"a": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)

    with pytest.raises(HeaderError) as caught:
        read_header(path)

    assert caught.value.code == "E_BAD_HEADER"


@pytest.mark.parametrize(
    ("sizes", "is_sound"),
    [
        ([], True),
        ([0, 5], True),
        ([2**20, 2**20, 0], True),
        ([2**40, 2, 0], False),
        ([1] * 9, False),
        ([-1], False),
        ([True], False),
        ([1.0], False),
    ],
    ids=str,
)
def test_sizes_of_a_segment(sizes: list[object], is_sound: bool) -> None:
    assert are_sizes(sizes) is is_sound


@pytest.mark.parametrize(
    ("scale", "code"),
    [(1.0, None), (2.2, None), (2.3, "E_GLOBAL_DIRECTION"), (3e38, "E_GLOBAL_DIRECTION")],
)
def test_fp8_scale_that_gives_weights_beyond_belief_is_refused(
    edit: Edit, scale: float, code: str | None
) -> None:
    made = edit("ok_modelopt_mixed_fp8")
    module = next(
        name.removesuffix(".weight")
        for name, (kind, _) in made.tensors.items()
        if kind == "F8_E4M3" and name.endswith(".weight")
    )
    kind, codes = made.tensors[f"{module}.weight"]
    codes[-1, -1] = 0x7E  # 448
    made.tensors[f"{module}.weight"] = (kind, codes)
    made.tensors[f"{module}.weight_scale"] = ("F32", np.float32(scale).reshape(()))
    root = made.write()

    if code is None:
        assert identify(root).modules
    else:
        with pytest.raises(ApplianceError) as caught:
            identify(root)
        [fault] = caught.value.faults
        assert (fault.code, fault.where) == (code, f"{module}.weight_scale")


@pytest.mark.parametrize(
    ("scale", "code"), [(0x85, None), (0xFF, "E_SCALE_NAN"), (0xFE, "E_GLOBAL_DIRECTION")]
)
def test_mxfp4_scales_are_checked_as_others_are(scale: int, code: str | None) -> None:
    stored = Stored("a", Layout.MXFP4, "a.weight", "a.weight_scale")
    codes, scales = np.full((2, 16), 0x77, np.uint8), np.array([[0x7F], [scale]], np.uint8)
    matrix = Matrix(stored, codes, scales, None, 32)

    if code is None:
        assert matrix.values()[1].tolist() == [6.0 * 64] * 32
    else:
        with pytest.raises(ApplianceError) as caught:
            matrix.values()
        assert (caught.value.faults[0].code, caught.value.faults[0].where) == (
            code,
            "a.weight_scale",
        )


def test_key_heads_that_do_not_divide_the_value_heads_are_refused(
    edit: Edit, codes: Callable[[Path], list[str]]
) -> None:
    made = edit("ok_qwen35_gdn_quasar_like")
    text = made.config["text_config"]
    assert codes(made.write()) == []

    text["linear_num_key_heads"] = text["linear_num_value_heads"] + 1

    assert codes(made.write()) == ["E_CONFIG"]
