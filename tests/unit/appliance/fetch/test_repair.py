"""A finished fetch that was damaged since: only what is damaged is brought again."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fetching import COMMIT, LARGE, SMALL, Wanted, cli, killed, run

from appliance.checkpoint.manifest import verify_manifest
from appliance.errors import ApplianceError


def damage(target: Path, kind: str) -> None:
    """Damage the small shard of a finished fetch."""
    content = (target / SMALL).read_bytes()
    (target / SMALL).unlink()
    if kind == "cut":
        (target / SMALL).write_bytes(content[:-1])
    elif kind == "flipped":
        (target / SMALL).write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])


@pytest.mark.parametrize("revision", [COMMIT, "main"])
@pytest.mark.parametrize("kind", ["cut", "flipped", "gone"])
def test_fetch_that_is_there_and_damaged_fetches_only_what_is(
    local_hub: Any, tmp_path: Path, wanted: Wanted, revision: str, kind: str
) -> None:
    run(tmp_path / "dst", revision)
    kept = (tmp_path / "dst" / LARGE).stat().st_ino
    damage(tmp_path / "dst", kind)
    local_hub.requests.clear()
    stream = io.StringIO()

    report = run(tmp_path / "dst", revision, stream)

    assert report["replaced"] == [SMALL]
    assert [path for path, _ in local_hub.requests if "/resolve/" in path] == [
        f"/team/model/resolve/{COMMIT}/{SMALL}"
    ]
    assert (tmp_path / "dst" / LARGE).stat().st_ino == kept
    assert f"WARNING fetch.damaged name={SMALL} found=" in stream.getvalue()
    wanted(tmp_path / "dst")
    verify_manifest(tmp_path / "dst")
    assert run(tmp_path / "dst", revision)["replaced"] == []


def test_fetch_says_what_it_replaced(local_hub: Any, tmp_path: Path) -> None:
    run(tmp_path / "dst")
    damage(tmp_path / "dst", "flipped")

    done = cli(tmp_path / "dst")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"replaced {SMALL} in {tmp_path / 'dst'}, at {COMMIT}, in ")
    assert local_hub.requests


@pytest.mark.parametrize("content", [None, b"no list", b"0" * 64 + b"  config.json\n"])
def test_fetch_whose_list_of_digests_is_damaged_writes_it_again(
    local_hub: Any, tmp_path: Path, wanted: Wanted, content: bytes | None
) -> None:
    run(tmp_path / "dst")
    right = (tmp_path / "dst/SHA256SUMS").read_bytes()
    (tmp_path / "dst/SHA256SUMS").unlink()
    if content is not None:
        (tmp_path / "dst/SHA256SUMS").write_bytes(content)
    asked = len(local_hub.requests)

    assert run(tmp_path / "dst")["replaced"] == ["SHA256SUMS"]

    assert (tmp_path / "dst/SHA256SUMS").read_bytes() == right
    assert len(local_hub.requests) == asked
    wanted(tmp_path / "dst")


def test_fetch_that_cannot_repair_leaves_the_directory_and_a_rerun_goes_on(
    local_hub: Any, tmp_path: Path, wanted: Wanted
) -> None:
    run(tmp_path / "dst")
    damage(tmp_path / "dst", "flipped")
    before = (tmp_path / "dst" / SMALL).read_bytes()
    local_hub.cut[SMALL] = 20_000
    local_hub.ranges = False  # each try begins again, and so gets nowhere

    with pytest.raises(ApplianceError, match="FETCH_UNREACHABLE"):
        run(tmp_path / "dst")

    assert (tmp_path / "dst" / SMALL).read_bytes() == before
    part = tmp_path / f"dst.part/{SMALL}.part"
    kept = part.stat().st_size
    local_hub.cut.clear()
    local_hub.status.clear()
    local_hub.requests.clear()
    assert run(tmp_path / "dst")["replaced"] == [SMALL]
    assert [span for path, span in local_hub.requests if path.endswith(SMALL)] == [f"bytes={kept}-"]
    wanted(tmp_path / "dst")


@pytest.mark.slow
def test_repair_killed_at_any_step_leaves_whole_files_and_a_rerun_finishes(
    local_hub: Any, tmp_path: Path, wanted: Wanted
) -> None:
    target = tmp_path / "dst"
    run(target)
    damage(target, "flipped")
    whole = killed(0, target)
    assert whole.returncode == 0, whole.stderr
    events = int(whole.stderr.rpartition("events=")[2])
    assert local_hub.requests

    for at in range(8, events + 1, 4):
        damage(target, "flipped")
        assert killed(at, target).returncode == -9
        assert (target / SMALL).stat().st_size == len(local_hub.files[SMALL])
        run(target)
        wanted(target)


def edited(**changes: Any) -> Callable[[Path], None]:
    """Return what changes keys of the report in place."""

    def edit(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def flipped(path: Path) -> None:
    """Change one digit of a digest, as a worn disk would."""
    text = path.read_text()
    at = text.index('"sha256": "', text.index(LARGE)) + 20
    path.write_text(text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :])


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "nested without end": lambda path: path.write_bytes(b"[" * 100_000),
    "no files": edited(files=[]),
    "less files": edited(files={"config.json": {"bytes": 23, "sha256": "", "git_sha1": ""}}),
    "a file of nothing": edited(files={"config.json": {}}),
    "no size": edited(bytes=None),
    "one digit": flipped,
}


@pytest.mark.usefixtures("local_hub")
@pytest.mark.parametrize("name", DAMAGES)
def test_fetch_with_a_damaged_report_writes_it_again(
    tmp_path: Path, wanted: Wanted, name: str
) -> None:
    run(tmp_path / "dst")
    path = tmp_path / "dst" / "fetch_report.json"
    right = json.loads(path.read_text())
    DAMAGES[name](path)
    damage(tmp_path / "dst", "flipped")

    assert run(tmp_path / "dst")["replaced"] == [SMALL, "fetch_report.json"]

    assert json.loads(path.read_text()) == right
    wanted(tmp_path / "dst")
    verify_manifest(tmp_path / "dst")


def test_damaged_report_of_another_checkpoint_leaves_it_alone(
    local_hub: Any, tmp_path: Path
) -> None:
    run(tmp_path / "dst")
    (tmp_path / "dst" / "fetch_report.json").write_bytes(b"{}")
    local_hub.files[LARGE] = local_hub.files[LARGE][::-1]
    before = {path.name: path.read_bytes() for path in (tmp_path / "dst").iterdir()}

    with pytest.raises(ApplianceError, match="OUTPUT_EXISTS"):
        run(tmp_path / "dst")

    assert {path.name: path.read_bytes() for path in (tmp_path / "dst").iterdir()} == before


@pytest.mark.parametrize("change", ["other digest", "no line"])
def test_manifest_that_does_not_list_the_report_is_written_again(
    local_hub: Any, tmp_path: Path, change: str
) -> None:
    run(tmp_path / "dst")
    manifest = tmp_path / "dst/SHA256SUMS"
    right = manifest.read_text()
    others = [line for line in right.splitlines() if "fetch_report.json" not in line]
    wrong = [f"{'0' * 64}  fetch_report.json"] if change == "other digest" else []
    manifest.write_text("\n".join([*others, *wrong]) + "\n")
    asked = len(local_hub.requests)

    assert run(tmp_path / "dst")["replaced"] == ["SHA256SUMS"]

    assert manifest.read_text() == right
    assert len(local_hub.requests) == asked


def test_fetch_over_a_whole_directory_says_that_it_is_there(local_hub: Any, tmp_path: Path) -> None:
    assert not run(tmp_path / "dst")["already_there"]
    local_hub.requests.clear()

    done = cli(tmp_path / "dst")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'dst'} is there already, whole: 4 files, ")
    assert local_hub.requests == []


@pytest.mark.usefixtures("local_hub")
def test_repair_that_cannot_replace_a_file_names_it(tmp_path: Path) -> None:
    run(tmp_path / "dst")
    damaged = tmp_path / "dst" / SMALL
    damaged.unlink()
    damaged.mkdir()

    with pytest.raises(ApplianceError) as caught:
        run(tmp_path / "dst")

    [fault] = caught.value.faults
    assert (fault.code, fault.where) == ("OUTPUT_UNWRITABLE", str(damaged))
