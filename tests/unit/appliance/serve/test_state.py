"""What outlives a run: budget, quiet refusals, unclean stops, a host that needs help."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from small_volume import SmallVolume, small_volume

from appliance.errors import ApplianceError, ExitCode
from appliance.serve import state
from appliance.serve.state import End, HostAction, Record, Running, StateDirectory

FILE = Path("/var/lib/appliance/serve.json")
WHOLE = Record(
    ends=(End(100.0, 41, "ENGINE_DIED"),),
    running=Running(200.0, "boot"),
    refusal=End(300.0, 20, "GATE_FAILED"),
    host_action=HostAction("boot", "pid:[1]", ("12:D",)),
)


def ends(*times: float) -> Record:
    return Record(ends=tuple(End(at, 41, "ENGINE_DIED") for at in times))


def test_record_written_is_read_back_equal(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path / "state")

    directory.save(WHOLE)

    assert directory.load() == WHOLE
    assert list((tmp_path / "state").glob("*.tmp")) == []
    directory.close()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"ends": 3}', '{"ends": [{"at": 1}]}'])
def test_damaged_record_is_set_aside_and_forgotten(tmp_path: Path, content: str) -> None:
    directory = StateDirectory(tmp_path)
    directory.file.write_text(content)

    record = directory.load()

    assert record == Record()
    assert (tmp_path / "serve.bad").read_text() == content
    assert not directory.file.exists()
    directory.close()


def test_directory_belongs_to_one_appliance_until_it_is_closed(tmp_path: Path) -> None:
    first = StateDirectory(tmp_path)

    with pytest.raises(ApplianceError) as refused:
        StateDirectory(tmp_path)
    first.close()
    StateDirectory(tmp_path).close()

    assert refused.value.exit_code is ExitCode.CONTAINER
    assert refused.value.faults[0].code == "STATE_DIR_IN_USE"


def test_directory_that_cannot_be_made_is_refused_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ApplianceError) as refused:
        StateDirectory(tmp_path / "file/state")

    assert refused.value.exit_code is ExitCode.CONTAINER
    assert str(refused.value).startswith(f"error[STATE_DIR] gate.state_dir {tmp_path}/file/state:")


@pytest.mark.parametrize(
    ("times", "count", "refused"),
    [
        ((), 3, False),
        ((), 0, False),
        ((9_000.0, 9_500.0), 3, False),
        ((9_000.0, 9_500.0, 9_900.0), 3, True),
        ((1_000.0, 9_500.0, 9_900.0), 3, False),  # the first is older than the span
        ((9_900.0,), 0, True),
        ((13_000.0,), 1, True),  # the clock was set back
        ((20_000.0,), 1, False),  # the clock was wrong then
    ],
)
def test_budget_counts_ends_within_the_span(
    times: tuple[float, ...], count: int, refused: bool
) -> None:
    fault = state.budget_fault(ends(*times), count=count, per_s=3600.0, now=10_000.0, path=FILE)

    assert (fault is not None) == refused


def test_budget_says_when_it_will_allow_a_start_again() -> None:
    fault = state.budget_fault(
        ends(9_000.0, 9_900.0), count=2, per_s=3600.0, now=10_000.0, path=FILE
    )

    assert fault is not None
    assert fault.value == "2 (ENGINE_DIED)"
    assert "wait 2600 s" in fault.fix


@pytest.mark.parametrize(
    ("record", "now", "expected"),
    [
        (Record(), 1000.0, 0.0),
        (Record(refusal=End(990.0, 20, "GATE_FAILED")), 1000.0, 50.0),
        (Record(refusal=End(940.0, 20, "GATE_FAILED")), 1000.0, 0.0),
        (Record(refusal=End(990.0, 20, "OTHER")), 1000.0, 0.0),
        (Record(refusal=End(5000.0, 20, "GATE_FAILED")), 1000.0, 0.0),
    ],
)
def test_same_refusal_is_said_once_a_minute(record: Record, now: float, expected: float) -> None:
    assert state.quiet_s(record, code="GATE_FAILED", now=now) == expected


def test_killed_run_counts_and_a_reboot_does_not() -> None:
    record = Record(running=Running(1.0, "boot"))

    killed = state.unclean_end(record, boot_id="boot", now=2.0)
    rebooted = state.unclean_end(record, boot_id="next", now=2.0)
    clean = state.unclean_end(Record(), boot_id="boot", now=2.0)

    assert killed == End(2.0, 0, "UNCLEAN_STOP")
    assert (rebooted, clean) == (None, None)


@pytest.mark.parametrize(
    ("boot", "namespace", "process", "refused"),
    [
        ("boot", "pid:[1]", f"{os.getpid()}:D", True),
        ("boot", "pid:[1]", "4194399:D", False),  # same namespace, and it is gone
        ("boot", "pid:[2]", "4194399:D", True),  # another namespace cannot see it
        ("boot", "pid:[1]", "unknown:D", True),
        ("next", "pid:[2]", f"{os.getpid()}:D", False),  # the host was rebooted
    ],
    ids=("here", "gone", "elsewhere", "unknown", "rebooted"),  # xdist needs names without pids
)
def test_host_action_is_required_until_the_process_or_the_boot_is_gone(
    boot: str, namespace: str, process: str, refused: bool
) -> None:
    record = Record(host_action=HostAction("boot", "pid:[1]", (process,)))

    fault = state.host_action_fault(record, boot_id=boot, namespace=namespace, path=FILE)

    assert (fault is not None) == refused
    if fault is not None:
        assert process in fault.value


@pytest.mark.parametrize(
    ("record", "boot", "expected"),
    [
        (Record(running=Running(1.0, "boot")), "next", True),
        (Record(running=Running(1.0, "boot")), "boot", False),
        (Record(running=Running(1.0, "boot")), "", False),
        (Record(running=Running(1.0, "")), "next", False),
        (Record(), "next", False),
    ],
)
def test_rc_025_reboot_under_a_run_is_noticed(record: Record, boot: str, expected: bool) -> None:
    assert state.rebooted(record, boot_id=boot) is expected


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[SmallVolume]:
    """A file system of 128 KiB."""
    with small_volume(tmp_path / "volume", "128k") as made:
        yield made


LARGEST = Record(ends=tuple(End(1764486000.1 + n, 41, "ENGINE_DIED") for n in range(100)))


@pytest.mark.parametrize("record", [WHOLE, LARGEST], ids=["small", "of a hundred ends"])
def test_record_is_kept_on_a_full_volume_again_and_again(
    volume: SmallVolume, record: Record
) -> None:
    directory = StateDirectory(volume.path)
    directory.reserve()
    directory.save(Record())

    for number in range(4):
        changed = replace(record, running=Running(float(number), "boot"))
        volume.fill()
        directory.save(changed)
        assert directory.load() == changed
    directory.close()
    assert list(volume.path.glob("*.tmp")) == []


def test_full_volume_has_no_room_to_begin_a_run_and_keeps_its_record(volume: SmallVolume) -> None:
    directory = StateDirectory(volume.path)
    directory.reserve()
    directory.save(WHOLE)
    volume.fill()

    with pytest.raises(OSError, match="No space left"):
        directory.reserve()
    with pytest.raises(OSError, match="No space left"):
        directory.save(Record(), spare=False)

    assert directory.load() == WHOLE
    assert list(volume.path.glob("*.tmp")) == []
    directory.save(Record())  # the spare of the run before is still whole
    assert directory.load() == Record()
    directory.close()


def test_full_volume_without_a_spare_says_so(volume: SmallVolume) -> None:
    directory = StateDirectory(volume.path)
    directory.save(WHOLE)
    volume.fill()

    with pytest.raises(OSError, match="No space left"):
        directory.save(Record())

    assert directory.load() == WHOLE
    directory.close()


def test_what_killed_runs_were_writing_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    unfinished = [tmp_path / name for name in ("serve.7.tmp", "last_run.7.tmp", "run/admin.7.tmp")]
    others = [tmp_path / "serve.json", tmp_path / "gate.7.tmp"]
    for path in (*unfinished, *others):
        path.touch()

    StateDirectory(tmp_path).close()

    assert [path.exists() for path in (*unfinished, *others)] == [False] * 3 + [True] * 2
