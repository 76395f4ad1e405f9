"""The whole line over the stand-in engine while a volume has no room."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from small_volume import SmallVolume, small_volume

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Start


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[SmallVolume]:
    """A file system of 256 KiB for the state."""
    with small_volume(tmp_path / "volume", "256k") as made:
        yield made


def record(volume: SmallVolume) -> dict[str, Any]:
    return json.loads((volume.path / "serve.json").read_text())


def test_clean_stops_on_a_full_volume_are_clean_and_use_up_no_budget(
    start: Start, volume: SmallVolume
) -> None:
    for _ in range(3):
        running = start(state=volume.path, budget=2)
        running.wait_for("ready", 200)
        volume.fill()
        running.stop()

        assert running.wait() == 0
        assert running.named("serve.unclean_stop") == []
        assert running.named("serve.state_not_saved") == []
        assert (record(volume)["running"], record(volume)["ends"]) == (None, [])
        volume.empty()
    assert list(volume.path.glob("*.tmp")) == []


def test_crash_on_a_full_volume_is_counted_with_its_last_lines(
    start: Start, volume: SmallVolume
) -> None:
    (volume.path / "last_run.json").write_text("x" * 8192)
    running = start(state=volume.path, behave={"load_s": 2.0, "log": ["boom"], "exit": 3})
    running.wait_for("startup", 200)
    volume.fill()

    assert running.wait() == 40
    assert [end["code"] for end in record(volume)["ends"]] == ["ENGINE_FAILED"]
    assert record(volume)["running"] is None
    assert json.loads((volume.path / "last_run.json").read_text())["lines"] == ["boom"]


def test_start_on_a_full_volume_is_refused_with_12_and_counts_as_nothing(
    start: Start, volume: SmallVolume
) -> None:
    first = start(state=volume.path)
    first.wait_for("ready", 200)
    first.stop()
    assert first.wait() == 0
    volume.fill()

    refused = start(state=volume.path)

    assert refused.wait() == 12
    assert "error[STATE_DIR] gate.state_dir" in refused.log.read_text()
    assert "No space left on device; free space on the volume" in refused.log.read_text()
    assert refused.named("engine.start") == []
    assert (record(volume)["running"], record(volume)["ends"]) == (None, [])

    volume.empty()
    second = start(state=volume.path)
    second.wait_for("ready", 200)
    assert second.named("serve.unclean_stop") == []


def test_shared_memory_of_dockers_default_is_refused_before_the_engine_starts(
    start: Start, volume: SmallVolume
) -> None:
    script = 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"'
    assert volume.path.exists()  # namespaces are allowed here
    under = ("unshare", "--mount", "--user", "--map-root-user", "sh", "-c", script, "sh")

    running = start(under=under)

    assert running.wait() == 12
    assert "error[SHM_TOO_SMALL] /dev/shm: 242 MiB free for the" in running.log.read_text()
    assert "got 64 MiB; set memory.shm_size to 16GiB" in running.log.read_text()
    assert running.named("engine.start") == []
