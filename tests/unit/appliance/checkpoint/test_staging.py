"""`DST.part`: all or nothing under the final name, and nothing of anybody else is touched."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from appliance.checkpoint.staging import LOCK_NAME, Staging, require_new, require_whole
from appliance.checkpoint.writer import ShardWriter, TensorSpec, write_file, write_json
from appliance.errors import ApplianceError, ExitCode

NOWHERE = Path("/nowhere")


def refused(target: Path, source: Path = NOWHERE) -> ApplianceError:
    with pytest.raises(ApplianceError) as raised:
        Staging(target, source=source).__enter__()
    return raised.value


def test_staging_appears_under_its_name_only_when_committed(tmp_path: Path) -> None:
    target = tmp_path / "out"

    with Staging(target, source=NOWHERE) as staging:
        write_file(staging.path / "config.json", b"{}")
        assert not target.exists()
        staging.commit()

    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_staging_of_an_empty_current_directory_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    with Staging(Path(), source=NOWHERE) as staging:
        write_file(staging.path / "a", b"1")
        staging.commit()

    assert (tmp_path / "here/a").read_bytes() == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_staging_left_without_commit_keeps_its_files_for_the_next_run(tmp_path: Path) -> None:
    with Staging(tmp_path / "out", source=NOWHERE) as staging:
        write_file(staging.path / "a", b"1")

    with Staging(tmp_path / "out", source=NOWHERE) as staging:
        assert (staging.path / "a").read_bytes() == b"1"
        staging.clear()
        assert not (staging.path / "a").exists()

    assert not (tmp_path / "out").exists()


def test_staging_held_by_one_run_refuses_another(tmp_path: Path) -> None:
    with Staging(tmp_path / "out", source=NOWHERE), pytest.raises(ApplianceError) as raised:
        Staging(tmp_path / "out", source=NOWHERE).__enter__()

    assert raised.value.exit_code == ExitCode.USAGE
    assert raised.value.faults[0].code == "OUTPUT_BUSY"


def test_commit_onto_a_directory_that_came_to_be_is_refused(tmp_path: Path) -> None:
    with Staging(tmp_path / "out", source=NOWHERE) as staging:
        write_file(staging.path / "a", b"1")
        (tmp_path / "out").mkdir()
        (tmp_path / "out/other").write_text("")

        with pytest.raises(ApplianceError) as raised:
            staging.commit()

    assert raised.value.faults[0].code == "OUTPUT_EXISTS"
    assert (tmp_path / "out/other").exists()


def test_require_new_takes_an_absent_or_empty_directory_only(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")

    require_new(tmp_path / "absent")
    require_new(tmp_path / "empty")

    for used in ("file", ""):
        with pytest.raises(ApplianceError) as raised:
            require_new(tmp_path / used)
        assert raised.value.faults[0].code == "OUTPUT_EXISTS"


def test_staging_in_a_directory_of_another_origin_is_refused_and_leaves_it(tmp_path: Path) -> None:
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part/thesis.txt").write_text("mine")

    error = refused(tmp_path / "out")

    assert (error.exit_code, error.faults[0].code) == (ExitCode.USAGE, "OUTPUT_FOREIGN")
    assert [path.name for path in (tmp_path / "out.part").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("inside", [".", "model", "a/model.gguf"])
def test_staging_that_holds_the_source_is_refused_even_after_a_killed_run(
    tmp_path: Path, inside: str
) -> None:
    with Staging(tmp_path / "out", source=NOWHERE):
        pass

    error = refused(tmp_path / "out", tmp_path / "out.part" / inside)

    assert error.faults[0].code == "OUTPUT_FOREIGN"
    assert error.faults[0].value == "the source itself"


def test_staging_through_a_link_or_onto_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "link.part").symlink_to(tmp_path / "precious")
    (tmp_path / "file.part").write_text("mine")

    codes = [refused(tmp_path / name).faults[0].code for name in ("link", "file")]

    assert codes == ["OUTPUT_FOREIGN", "OUTPUT_FOREIGN"]
    assert (tmp_path / "file.part").read_text() == "mine"


def test_staging_takes_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "out.part").mkdir()

    with Staging(tmp_path / "out", source=NOWHERE) as staging:
        staging.commit()

    assert list((tmp_path / "out").iterdir()) == []


def test_lock_of_a_directory_that_was_renamed_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run opens the lock file, and the run that holds it commits before the lock is taken."""
    first = Staging(tmp_path / "out", source=NOWHERE)
    first.__enter__()
    write_file(first.path / "config.json", b"{}")
    opened = os.open

    def open_then_commit(path: Path, flags: int, mode: int = 0o777) -> int:
        handle = opened(path, flags, mode)
        if path.name == LOCK_NAME:
            monkeypatch.setattr(os, "open", opened)
            first.commit()
            first.__exit__()
        return handle

    monkeypatch.setattr(os, "open", open_then_commit)

    error = refused(tmp_path / "out")

    assert error.faults[0].code == "OUTPUT_BUSY"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
    assert not (tmp_path / "out.part").exists()


def test_staging_of_an_output_that_another_run_has_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/config.json").write_text("{}")

    assert refused(tmp_path / "out").faults[0].code == "OUTPUT_EXISTS"


@pytest.mark.parametrize("kind", ["file", "full", "dangling"])
def test_output_that_is_in_use_is_refused(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "out"
    if kind == "file":
        target.write_text("")
    elif kind == "full":
        target.mkdir()
        (target / "a").write_text("")
    else:
        target.symlink_to("nowhere")

    with pytest.raises(ApplianceError) as raised:
        require_new(target)

    assert raised.value.faults[0].code == "OUTPUT_EXISTS"


@pytest.mark.parametrize("name", ["a" * 300, "loop/x", "file/x"])
def test_output_that_cannot_be_reached_is_unwritable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("file").write_text("")

    assert refused(Path(name)).faults[0].code == "OUTPUT_UNWRITABLE"
    if name not in ("file/x", "loop/x"):
        with pytest.raises(ApplianceError, match="OUTPUT_UNWRITABLE"):
            require_new(Path(name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


@pytest.mark.parametrize("damage", ["nothing", "removed", "cut", "config", "other"])
def test_finished_output_that_lost_a_part_is_not_whole(tmp_path: Path, damage: str) -> None:
    spec = TensorSpec("a", "U8", (0,))
    shard = tmp_path / "model.safetensors"
    with ShardWriter(shard, [spec]) as writer:
        writer.write("a", np.zeros(0, np.uint8))
    write_json(tmp_path / "config.json", {})
    wanted = {"a": ("U8", (1,) if damage == "other" else (0,))}
    if damage == "removed":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "config":
        (tmp_path / "config.json").unlink()

    if damage == "nothing":
        require_whole(tmp_path, wanted)
    else:
        with pytest.raises(ApplianceError) as raised:
            require_whole(tmp_path, wanted)

        assert raised.value.exit_code == ExitCode.CHECKPOINT_CORRUPT
        assert raised.value.faults[0].code == "OUTPUT_DAMAGED"
