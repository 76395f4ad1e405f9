"""Every container file of the handed vectors: values bit for bit, or exactly the expected code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.checkpoint.container import check_payload
from appliance.checkpoint.container_arrays import ContainerReader
from appliance.checkpoint.legacy import open_container
from appliance.checkpoint.read import summarize
from appliance.cli import main
from appliance.errors import ApplianceError

CORRUPT = {"E_TRUNCATED", "E_DIR_CRC", "E_LEGACY_SIZE"}
OLD_INDEX = "quasar/legacy_index.json"


def test_container_holds_the_values_or_is_refused(container: dict[str, Any], vectors: Path) -> None:
    path = vectors / container["file"]
    if "expect_error" in container:
        with pytest.raises(ApplianceError) as caught:
            open_container(path, vectors / OLD_INDEX)
        code = container["expect_error"]
        assert [fault.code for fault in caught.value.faults] == [code]
        assert caught.value.exit_code == (31 if code in CORRUPT else 30)
        return

    opened = open_container(path, vectors / OLD_INDEX)
    check_payload(opened)

    # The file of scales has no values of its own in the manifest: its codes lie beside it.
    expected = np.load(vectors / container.get("expected", "quasar/legacy_expected.npz"))
    reader = ContainerReader(opened)
    found = {
        each.name: reader.array(each, "data") if each.is_dense else reader.matrix(each).values()
        for each in opened.tensors
    }
    assert found.keys() == set(expected.files)
    for name, values in found.items():
        assert values.dtype == expected[name].dtype
        np.testing.assert_array_equal(values.view(np.uint8), expected[name].view(np.uint8))


def test_digest_of_a_container_is_that_of_its_values_or_the_code(
    container: dict[str, Any], vectors: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, index = vectors / container["file"], vectors / OLD_INDEX

    status = main(["model", "digest", str(path), "--index", str(index), "--json"])

    report = json.loads(capsys.readouterr().out)
    if "expect_error" in container:
        assert status == report["exit_code"]
        assert [fault["code"] for fault in report["faults"]] == [container["expect_error"]]
    else:
        assert status == 0
        assert "model.layers.0.mlp.down_proj" in report["modules"]


def test_legacy_forms_hold_the_same_weights(vectors: Path) -> None:
    index = vectors / OLD_INDEX
    inline, split = (
        ContainerReader(open_container(vectors / "quasar" / name, index))
        for name in ("ok_legacy_inline.bin", "ok_legacy_split.model.bin")
    )

    for one, other in zip(inline.container.tensors, split.container.tensors, strict=True):
        np.testing.assert_array_equal(inline.matrix(one).values(), split.matrix(other).values())


@pytest.mark.parametrize("name", ["ok_legacy_inline.bin", "ok_legacy_split.model.bin"])
def test_legacy_form_without_an_index_is_refused(vectors: Path, name: str) -> None:
    with pytest.raises(ApplianceError) as caught:
        open_container(vectors / "quasar" / name)

    assert [fault.code for fault in caught.value.faults] == ["E_LEGACY_NO_INDEX"]


def test_inspect_shows_the_directory_of_a_container_or_the_code(
    container: dict[str, Any], vectors: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, index = vectors / container["file"], vectors / OLD_INDEX
    words = ["model", "inspect", str(path), "--index", str(index)]

    status = main([*words, "--json"])

    report = json.loads(capsys.readouterr().out)
    if container.get("expect_error") == "E_MAGIC":
        assert status == 30  # no container by its name and bytes: read as a directory, it is none
    elif "expect_error" in container:
        assert [fault["code"] for fault in report["faults"]] == [container["expect_error"]]
    else:
        assert (status, report["format"]) == (0, "quasar-container")
        assert report["tensors"]["model.layers.0.mlp.down_proj"]["shape"] == [24, 256]
        assert main(words) == 0
        assert "model.layers.0.mlp.down_proj [24, 256]" in capsys.readouterr().out


def test_directory_of_a_container_is_sent_to_convert(vectors: Path, tmp_path: Path) -> None:
    (tmp_path / "model.qsr").write_bytes((vectors / "quasar" / "ok_v1.bin").read_bytes())

    with pytest.raises(ApplianceError, match="appliance convert") as caught:
        summarize(tmp_path)

    assert [fault.code for fault in caught.value.faults] == ["E_CONTAINER"]


def test_verify_reads_the_checksums_of_a_container(
    vectors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.qsr"
    content = bytearray((vectors / "quasar" / "ok_v1.bin").read_bytes())
    path.write_bytes(content)
    assert main(["model", "verify", str(path)]) == 0
    assert "4 tensors, with checksums" in capsys.readouterr().out
    content[-1] ^= 1
    path.write_bytes(content)

    assert main(["model", "verify", str(path), "--json"]) == 31

    report = json.loads(capsys.readouterr().out)
    assert [fault["code"] for fault in report["faults"]] == ["E_PAYLOAD_CRC"]
    assert main(["model", "verify", str(path), "--no-hashes"]) == 0
