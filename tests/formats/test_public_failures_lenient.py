"""H11 of the public failures, where tensors may win: an excluded module that is packed is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.checkpoint.identity import identify
from appliance.checkpoint.read import summarize
from appliance.checkpoint.rules import Lenient
from appliance.cli import main

Edit = Callable[[str], Any]
Codes = Callable[[Path], list[str]]

LAYER = "model.layers.0"
Q, K = (f"{LAYER}.self_attn.{part}_proj" for part in "qk")


def packed(made: Any, like: str, shape: tuple[int, ...]) -> dict[str, tuple[str, np.ndarray]]:
    """Return the tensors of a packed matrix of a shape, made of the first rows of another."""
    parts = {
        name.rpartition(".")[2]: entry
        for name, entry in made.tensors.items()
        if name.startswith(f"{like}.")
    }
    return {
        suffix: (kind, array if array.size == 1 else np.resize(array, (shape[0], array.shape[1])))
        for suffix, (kind, array) in parts.items()
    }


@pytest.mark.parametrize("name", ["ok_modelopt_w4a4", "ok_ct_w4a16"])
def test_h11_tensors_win_where_that_is_asked_for(edit: Edit, codes: Codes, name: str) -> None:
    made = edit(name)
    shape = made.tensors["lm_head.weight"][1].shape
    made.drop("lm_head")
    for suffix, (kind, array) in packed(made, Q, shape).items():
        made.tensors[f"lm_head.{suffix}"] = (kind, array)
    root = made.write()
    assert codes(root) == ["E_EXCLUDED_BUT_QUANTIZED"]

    found = identify(root, lenient=Lenient.TENSORS_WIN)

    head = found.modules["lm_head"]
    assert (head.form, head.shape) == ("nvfp4", shape)
    for notes in (found.notes, summarize(root, Lenient.TENSORS_WIN).notes):
        [note] = [note for note in notes if note.startswith("W_EXCLUDED_BUT_QUANTIZED")]
        assert "excludes lm_head (1 in all)" in note


def test_h11_lenient_conversion_needs_no_leniency_afterwards(
    edit: Edit, codes: Codes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = edit("ok_modelopt_w4a4")
    shape = made.tensors["lm_head.weight"][1].shape
    made.drop("lm_head")
    for suffix, (kind, array) in packed(made, Q, shape).items():
        made.tensors[f"lm_head.{suffix}"] = (kind, array)
    words = ["convert", str(made.write()), str(tmp_path / "out"), "--to", "modelopt"]
    assert main(words) == 30

    assert main([*words, "--lenient", "tensors-win"]) == 0

    assert "warning W_EXCLUDED_BUT_QUANTIZED" in capsys.readouterr().err
    assert codes(tmp_path / "out") == []
    assert identify(tmp_path / "out").modules["lm_head"].shape == shape


@pytest.mark.parametrize("verb", ["inspect", "digest"])
def test_h11_verbs_take_the_option(
    edit: Edit, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = edit("ok_modelopt_w4a4")
    made.exclude(Q, K, f"{LAYER}.self_attn.v_proj")
    words = ["model", verb, str(made.write())]
    assert main(words) == 30

    assert main([*words, "--lenient", "tensors-win"]) == 0

    warned = capsys.readouterr().err
    assert f"excludes {Q}, " in warned
    assert "(3 in all)" in warned


def test_h11_verify_takes_the_option(edit: Edit, capsys: pytest.CaptureFixture[str]) -> None:
    made = edit("ok_modelopt_w4a4")
    made.exclude(Q)
    words = ["model", "verify", str(made.write())]  # a mini checkpoint has no tokenizer
    main(words)
    assert "E_EXCLUDED_BUT_QUANTIZED" in capsys.readouterr().err

    main([*words, "--lenient", "tensors-win"])

    refused = capsys.readouterr().err
    assert "E_TOKENIZER_MISSING" in refused
    assert "E_EXCLUDED_BUT_QUANTIZED" not in refused
