"""The archive: what is inside, in which order, for whom, and whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import stat
import subprocess
import sys
import tarfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from small_volume import small_volume

from appliance.bundle.archive import Entry, manifest_of, pack, write_whole
from appliance.errors import ApplianceError, ExitCode

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ENTRIES = (Entry("b.json", b"{}\n"), Entry("a.txt", reason="gone"), Entry("c/d.txt", b"end", "", 7))


def refused(path: Path, *, force: bool = False) -> tuple[str, int]:
    with pytest.raises(ApplianceError) as caught:
        write_whole(path, b"new", force=force)
    return caught.value.faults[0].code, int(caught.value.exit_code)


def test_manifest_says_what_is_inside_and_what_is_not() -> None:
    manifest = manifest_of(ENTRIES, version="1", made_at=AT)

    assert manifest == {
        "schema": "appliance-bundle/1",
        "version": "1",
        "made_at": "2026-01-02T03:04:05+00:00",
        "files": [
            {
                "path": "b.json",
                "bytes": 3,
                "sha256": hashlib.sha256(b"{}\n").hexdigest(),
                "left_out_bytes": 0,
            },
            {
                "path": "c/d.txt",
                "bytes": 3,
                "sha256": hashlib.sha256(b"end").hexdigest(),
                "left_out_bytes": 7,
            },
        ],
        "missing": [{"path": "a.txt", "reason": "gone"}],
    }


def test_archive_of_the_same_parts_is_the_same_and_names_nobody(tmp_path: Path) -> None:
    manifest = manifest_of(ENTRIES, version="1", made_at=AT)
    content = pack(ENTRIES, manifest, AT)
    (tmp_path / "b.tar.gz").write_bytes(content)

    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        members = archive.getmembers()
        first = archive.extractfile(members[0])
        assert first is not None
        assert json.load(first) == manifest

    assert content == pack(ENTRIES, manifest, AT)
    assert [member.name for member in members] == [
        f"appliance-bundle/{name}" for name in ("MANIFEST.json", "b.json", "c/d.txt")
    ]
    assert {(m.uid, m.gid, m.uname, m.gname, m.mode, m.mtime) for m in members} == {
        (0, 0, "", "", 0o600, int(AT.timestamp()))
    }


def test_archive_is_its_owners_alone_whatever_the_mask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_whole(tmp_path / "b", b"new", force=False)
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o600
    assert (tmp_path / "b").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_what_is_there_stays_without_force(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "dangling").symlink_to("nowhere")

    assert refused(tmp_path / "file") == ("OUTPUT_EXISTS", ExitCode.USAGE)
    assert refused(tmp_path / "dangling") == ("OUTPUT_EXISTS", ExitCode.USAGE)
    assert (tmp_path / "file").read_text() == "old"


def test_force_replaces_a_file_and_a_link_but_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o644)
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "target").write_text("old")
    os.mkfifo(tmp_path / "pipe")

    for name in ("file", "link"):
        write_whole(tmp_path / name, b"new", force=True)

    assert (tmp_path / "file").read_bytes() == (tmp_path / "link").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert (tmp_path / "target").read_text() == "old"
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        assert refused(path, force=True) == ("OUTPUT_EXISTS", ExitCode.USAGE)


def test_place_that_takes_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for path in (tmp_path / "none/b", tmp_path / "file/b", Path("/proc/b"), Path("a\0b")):
        assert refused(path) == ("OUTPUT_UNWRITABLE", ExitCode.CONTAINER), path


def test_full_disk_leaves_nothing_and_the_old_one_whole(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("old")
    script = (
        "import sys; from pathlib import Path\n"
        "from appliance.bundle.archive import write_whole\n"
        "write_whole(Path(sys.argv[1]), bytes(100_000), force=True)\n"
    )

    done = subprocess.run(
        (sys.executable, "-c", script, tmp_path / "b"),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )

    assert "error[DISK_FULL]" in done.stderr
    assert (tmp_path / "b").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_full_volume_takes_no_half_archive(tmp_path: Path) -> None:
    with small_volume(tmp_path / "volume", "64k") as volume:
        (volume.path / "b").write_text("old")
        volume.fill()

        with pytest.raises(ApplianceError) as caught:
            write_whole(volume.path / "b", bytes(100_000), force=True)

        assert caught.value.faults[0].code == "DISK_FULL"
        assert sorted(path.name for path in volume.path.iterdir()) == ["b", "filler"]
        assert (volume.path / "b").read_text() == "old"
        volume.empty()
        write_whole(volume.path / "b", b"new", force=True)
        assert (volume.path / "b").read_bytes() == b"new"


def test_fix_names_force_only_where_it_helps(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for path, helps in ((tmp_path / "file", True), (tmp_path, False)):
        with pytest.raises(ApplianceError) as caught:
            write_whole(path, b"new", force=False)
        assert ("--force" in caught.value.faults[0].fix) is helps
