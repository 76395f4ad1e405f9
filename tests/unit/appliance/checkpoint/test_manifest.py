"""The digests of a checkpoint's files."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from appliance.checkpoint.manifest import MANIFEST, verify_manifest
from appliance.errors import ApplianceError, ExitCode

FILES = {"config.json": b"{}", "model.safetensors": b"\0" * 5000, "a b.txt": b"merges"}


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """Return a checkpoint whose manifest `sha256sum` wrote."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "notes.md").write_text("not read by the engine")
    with (tmp_path / MANIFEST).open("w") as file:
        subprocess.run(("sha256sum", "--", *FILES), cwd=tmp_path, stdout=file, check=True)
    return tmp_path


def refused(root: Path) -> tuple[ExitCode, list[tuple[str, str]]]:
    with pytest.raises(ApplianceError) as caught:
        verify_manifest(root)
    faults = caught.value.faults
    return caught.value.exit_code, [(fault.code, Path(fault.where).name) for fault in faults]


def test_manifest_of_sha256sum_is_verified_and_the_bytes_are_counted(listed: Path) -> None:
    assert verify_manifest(listed) == sum(map(len, FILES.values()))


def test_manifest_that_names_itself_and_subfolders_is_verified(listed: Path) -> None:
    (listed / "sub").mkdir()
    (listed / "sub/x.bin").write_bytes(b"x")
    digest = hashlib.sha256(b"x").hexdigest()
    with (listed / MANIFEST).open("a") as file:
        file.write(f"{'0' * 64} *{MANIFEST}\n{digest.upper()} *./sub/x.bin\n")

    assert verify_manifest(listed) == sum(map(len, FILES.values())) + 1


def test_one_changed_byte_is_corrupt(listed: Path) -> None:
    content = bytearray(FILES["model.safetensors"])
    content[4999] ^= 1
    (listed / "model.safetensors").write_bytes(content)

    assert refused(listed) == (ExitCode.CHECKPOINT_CORRUPT, [("E_DIGEST", "model.safetensors")])


def test_missing_manifest_is_refused_with_what_to_do(listed: Path) -> None:
    (listed / MANIFEST).unlink()

    with pytest.raises(ApplianceError, match="No such file or directory; write it where") as caught:
        verify_manifest(listed)

    assert caught.value.exit_code is ExitCode.CHECKPOINT_UNSUPPORTED


def test_file_that_was_put_beside_the_listed_ones_is_refused(listed: Path) -> None:
    (listed / "modeling.py").write_text("")

    assert refused(listed) == (ExitCode.CHECKPOINT_UNSUPPORTED, [("E_MANIFEST", "modeling.py")])


def test_listed_file_that_is_gone_is_refused(listed: Path) -> None:
    (listed / "a b.txt").unlink()

    assert refused(listed) == (ExitCode.CHECKPOINT_UNSUPPORTED, [("E_MANIFEST", "a b.txt")])


@pytest.mark.parametrize(
    "line",
    [
        "",
        "nonsense",
        f"{'0' * 63}  config.json",
        f"{'0' * 64}  /etc/passwd",
        f"{'0' * 64}  ../config.json",
        f"{'0' * 64}  config.json",
    ],
    ids=["empty", "words", "short", "absolute", "above", "two digests"],
)
def test_malformed_manifest_is_refused_with_its_line(listed: Path, line: str) -> None:
    with (listed / MANIFEST).open("a") as file:
        file.write(line + "\n")

    assert refused(listed) == (ExitCode.CHECKPOINT_UNSUPPORTED, [("E_MANIFEST", f"{MANIFEST}:4")])


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"\n"])
def test_manifest_without_a_line_is_refused(listed: Path, content: bytes) -> None:
    (listed / MANIFEST).write_bytes(content)

    code, faults = refused(listed)

    assert (code, faults[0][0]) == (ExitCode.CHECKPOINT_UNSUPPORTED, "E_MANIFEST")
