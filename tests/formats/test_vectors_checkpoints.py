"""Every mini checkpoint of the handed vectors: the digest of each module, or exactly the code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoint.read import summarize
from appliance.cli import main
from appliance.errors import ApplianceError
from appliance.plan.split import Split, obstacles

VALUE_CODES = {"E_SCALE_NAN", "E_GLOBAL_INVALID", "E_GLOBAL_DIRECTION"}
"""Defects in values, which headers do not show."""

CORRUPT = {"E_TRUNCATED"}


def expected_code(checkpoint: dict[str, Any]) -> str | None:
    code = checkpoint.get("expect_error")
    return None if code is None or " at " in code else str(code)


def test_digest_is_the_manifests_or_the_code(
    checkpoint: dict[str, Any], vectors: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = expected_code(checkpoint)

    status = main(["model", "digest", str(vectors / checkpoint["dir"]), "--json"])

    report = json.loads(capsys.readouterr().out)
    if code is None:
        found = {
            name: [entry["shape"], entry["sha256"], entry["sum"]]
            for name, entry in report["modules"].items()
        }
        wanted = checkpoint.get("dequant_fp32_sha256", found)
        assert status == 0
        assert found == wanted
        assert len(found) >= 7
    else:
        assert status == report["exit_code"] == (31 if code in CORRUPT else 30)
        assert {fault["code"] for fault in report["faults"]} == {code}


def test_inspect_gives_the_notes_or_the_code(
    checkpoint: dict[str, Any], vectors: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = expected_code(checkpoint)

    status = main(["model", "inspect", str(vectors / checkpoint["dir"]), "--json"])

    report = json.loads(capsys.readouterr().out)
    if code is None or code in VALUE_CODES:  # headers do not show values
        notes = " ".join(report["notes"])
        wanted = [note.split()[0] for note in checkpoint.get("expect_notes", ())]
        assert status == 0
        assert [note for note in wanted if note.startswith("W_") and note not in notes] == []
    else:
        assert status == report["exit_code"] == (31 if code in CORRUPT else 30)
        assert {fault["code"] for fault in report["faults"]} == {code}


def test_plan_refuses_a_split_that_cuts_a_block(checkpoint: dict[str, Any], vectors: Path) -> None:
    expected = checkpoint.get("expect_error") or ""
    if "E_TP_GROUP" not in expected and expected not in VALUE_CODES | {""}:
        with pytest.raises(ApplianceError):
            summarize(vectors / checkpoint["dir"])
        return
    summary = summarize(vectors / checkpoint["dir"])

    whole = obstacles(summary, Split(1, 1))
    halves = obstacles(summary, Split(2, 1))

    assert whole == []
    cut = [each for each in halves if each.code == "E_TP_GROUP"]
    step = 2 * summary.group_size
    expected_cut = [columns for _, columns in summary.input_widths if columns % step]
    assert len(cut) == len(expected_cut)
    if "E_TP_GROUP" in expected:
        assert "112 / 2" in cut[0].value
