"""Fetching over a real connection that is cut, lies, refuses, or ends with the process."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from fetching import COMMIT, LARGE, SMALL, Wanted, cli, killed, run, words_of

from appliance.checkpoint.manifest import verify_manifest
from appliance.errors import ApplianceError
from appliance.fetch.job import Job, fetch
from appliance.fetch.remote import HuggingFace


def refusal(target: Path, revision: str = COMMIT) -> tuple[int, str]:
    with pytest.raises(ApplianceError) as caught:
        run(target, revision)
    assert not target.exists()
    return int(caught.value.exit_code), caught.value.faults[0].code


def test_fetch_brings_what_is_served_and_lists_its_digests(
    local_hub: Any, tmp_path: Path, wanted: Wanted
) -> None:
    report = run(tmp_path / "dst", "main")

    wanted(tmp_path / "dst")
    assert report["commit"] == COMMIT
    assert report["bytes"] == sum(
        len(content) for name, content in local_hub.files.items() if name in report["files"]
    )
    verify_manifest(tmp_path / "dst")
    assert not (tmp_path / "escape.json").exists()
    assert not any("pytorch_model" in path for path, _ in local_hub.requests)


def test_fetch_of_a_commit_that_is_there_asks_nobody(
    local_hub: Any, tmp_path: Path, wanted: Wanted
) -> None:
    report = run(tmp_path / "dst")
    asked = len(local_hub.requests)

    assert run(tmp_path / "dst") == report | {"already_there": True}

    assert len(local_hub.requests) == asked
    wanted(tmp_path / "dst")


def test_fetch_of_a_branch_that_moved_leaves_the_finished_directory(
    local_hub: Any, tmp_path: Path
) -> None:
    run(tmp_path / "dst", "main")
    local_hub.commit = "f" * 40

    with pytest.raises(ApplianceError) as caught:
        run(tmp_path / "dst", "main")

    assert caught.value.faults[0].code == "OUTPUT_EXISTS"
    assert json.loads((tmp_path / "dst/fetch_report.json").read_text())["commit"] == COMMIT


@pytest.mark.parametrize("ranges", [True, False], ids=["resumes", "starts-again"])
def test_fetch_over_a_connection_that_is_cut_ends_with_the_right_bytes(
    local_hub: Any, tmp_path: Path, wanted: Wanted, ranges: bool
) -> None:
    local_hub.cut[SMALL] = 100_000 if ranges else 400_000
    local_hub.status[LARGE] = [503, 429]
    local_hub.ranges = ranges

    run(tmp_path / "dst")

    wanted(tmp_path / "dst")
    asked = [span for path, span in local_hub.requests if path.endswith(SMALL)]
    assert len(asked) >= (3 if ranges else 1)


def test_fetch_that_gets_nowhere_keeps_what_it_has_and_a_rerun_goes_on(
    local_hub: Any, tmp_path: Path, wanted: Wanted
) -> None:
    local_hub.cut[LARGE] = 200_000
    local_hub.status[LARGE] = []
    stop_after(local_hub, LARGE, 3)
    assert refusal(tmp_path / "dst") == (12, "FETCH_UNREACHABLE")
    kept = (tmp_path / f"dst.part/{LARGE}.part").stat().st_size
    assert kept > 0
    local_hub.cut.clear()
    local_hub.status.clear()
    local_hub.requests.clear()

    stream = io.StringIO()
    run(tmp_path / "dst", stream=stream)

    wanted(tmp_path / "dst")
    spans = [span for path, span in local_hub.requests if path.endswith(LARGE)]
    assert spans == [f"bytes={kept}-"]
    assert f"resumed={kept}" in stream.getvalue()


def stop_after(hub: Any, name: str, answers: int) -> None:
    """Serve a file a few times, then only errors."""

    class Statuses(list[int]):
        def __init__(self) -> None:
            super().__init__([500])
            self.left = answers

        def __bool__(self) -> bool:
            self.left -= 1
            return self.left < 0

        def pop(self, _: Any = 0) -> int:
            return 500

    hub.status[name] = Statuses()


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        (LARGE, {"lfs": {"sha256": "1" * 64, "size": 1 << 20, "pointerSize": 130}}),
        ("config.json", {"blobId": "2" * 40}),
        (SMALL, {"size": 299_000}),
        (SMALL, {"size": 301_000}),
    ],
    ids=["sha256", "git-digest", "longer", "shorter"],
)
def test_fetch_of_content_that_is_not_what_the_hub_states_is_refused(
    local_hub: Any, tmp_path: Path, name: str, stated: dict[str, Any]
) -> None:
    local_hub.stated[name] = stated

    assert refusal(tmp_path / "dst") == (31, "FETCH_DAMAGED")

    assert not (tmp_path / "dst.part" / name).exists()


def test_fetch_of_content_damaged_once_fetches_it_again(
    local_hub: Any, tmp_path: Path, wanted: Wanted
) -> None:
    right = local_hub.files[SMALL]
    partial = tmp_path / "dst.part" / f"{SMALL}.part"
    local_hub.status[SMALL] = [403]
    assert refusal(tmp_path / "dst") == (30, "FETCH_DENIED")
    partial.write_bytes(b"x" * 1000)  # not what the hub has

    run(tmp_path / "dst")

    assert right == (tmp_path / "dst" / SMALL).read_bytes()
    wanted(tmp_path / "dst")


def test_fetch_of_an_unknown_revision_or_repository_is_refused(
    local_hub: Any, tmp_path: Path
) -> None:
    assert local_hub.url
    assert refusal(tmp_path / "dst", "nowhere") == (30, "FETCH_NOT_FOUND")
    with pytest.raises(ApplianceError) as caught:
        fetch(Job("hub", "no/body", "main", tmp_path / "dst"), HuggingFace(), io.StringIO())
    assert caught.value.faults[0].code == "FETCH_NOT_FOUND"


def test_fetch_of_a_repository_without_safetensors_is_refused(
    local_hub: Any, tmp_path: Path
) -> None:
    for name in (LARGE, SMALL):
        del local_hub.files[name]

    assert refusal(tmp_path / "dst") == (30, "FETCH_EMPTY")


def test_fetch_of_another_commit_does_not_mix_files(
    local_hub: Any, tmp_path: Path, wanted: Wanted
) -> None:
    local_hub.status[SMALL] = [403]
    assert refusal(tmp_path / "dst")[1] == "FETCH_DENIED"
    assert (tmp_path / "dst.part" / LARGE).exists()
    local_hub.commit = "f" * 40
    local_hub.files[LARGE] = bytes(reversed(local_hub.files[LARGE]))

    run(tmp_path / "dst", "f" * 40)

    wanted(tmp_path / "dst")


def test_fetch_without_a_hub_or_without_the_network_says_which(
    local_hub: Any, tmp_path: Path
) -> None:
    closed = cli(tmp_path / "dst", HF_ENDPOINT="http://127.0.0.1:1")
    offline = cli(tmp_path / "dst", HF_HUB_OFFLINE="1")

    assert local_hub.requests == []
    assert (closed.returncode, offline.returncode) == (12, 2)
    assert closed.stderr.splitlines()[-1].startswith("error[FETCH_UNREACHABLE]")
    assert offline.stderr.startswith("error[FETCH_OFFLINE]")
    assert not (tmp_path / "dst.part").exists()


def test_fetch_from_modelscope_without_its_package_names_it(local_hub: Any, tmp_path: Path) -> None:
    done = cli(tmp_path / "dst", "--source", "modelscope")

    assert done.returncode == 2
    assert "error[PACKAGE_MISSING]" in done.stderr
    assert "modelscope" in done.stderr
    assert local_hub.requests == []


def test_fetch_onto_a_full_file_system_says_so_and_goes_on_with_room(
    local_hub: Any, tmp_path: Path, wanted: Wanted
) -> None:
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY));"
        "from appliance.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    full = subprocess.run(
        (sys.executable, "-c", script, *words_of(tmp_path / "dst")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert local_hub.requests
    assert full.returncode == 12
    assert "error[DISK_FULL]" in full.stderr
    assert not (tmp_path / "dst").exists()

    run(tmp_path / "dst")

    wanted(tmp_path / "dst")


def test_fetch_killed_in_the_middle_of_a_file_goes_on_with_the_next_byte(
    local_hub: Any, tmp_path: Path, wanted: Wanted
) -> None:
    local_hub.pause = threading.Event()
    command = (sys.executable, "-m", "appliance", *words_of(tmp_path / "dst"))
    process = subprocess.Popen(command)
    partial = tmp_path / "dst.part" / f"{LARGE}.part"
    waiting = threading.Event()
    while not (partial.exists() and partial.stat().st_size):
        assert process.poll() is None
        waiting.wait(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    local_hub.pause.set()
    kept = partial.stat().st_size
    assert not (tmp_path / "dst").exists()
    local_hub.requests.clear()

    run(tmp_path / "dst")

    spans = [span for path, span in local_hub.requests if path.endswith(LARGE)]
    assert spans == [f"bytes={kept}-"]
    wanted(tmp_path / "dst")


@pytest.mark.slow
def test_fetch_killed_at_any_step_leaves_all_or_nothing_and_a_rerun_finishes(
    local_hub: Any, tmp_path: Path, wanted: Wanted
) -> None:
    whole = killed(0, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    events = int(whole.stderr.rpartition("events=")[2])
    assert local_hub.requests

    for at in range(2, events + 1, 6):
        target = tmp_path / f"dst{at}"
        assert killed(at, target).returncode == -9
        if target.exists():
            assert (target / "SHA256SUMS").exists()
            (target / ".appliance-staging").unlink(missing_ok=True)
            wanted(target)
        run(target)
        (target / ".appliance-staging").unlink(missing_ok=True)
        wanted(target)
