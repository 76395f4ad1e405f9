"""The state file: whole or set aside, never half and never silent."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from healthchecks.collect import Depth
from healthchecks.facts import EccFacts, KernelFacts, XidFacts
from healthchecks.history import acknowledge, advance
from healthchecks.hold import hold_gpus, release_gpus
from healthchecks.runner import Options, ack, run
from healthchecks.state import State
from healthchecks.state_file import StateFile, StateUnavailableError, plain_of, state_of

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


@pytest.fixture
def eventful(machine) -> State:
    """Return a state with something in every list."""
    gpu = machine.gpu(0, ecc=EccFacts(True, True, 1, 1, 5, 2))
    host = machine.host(
        gpu, machine.gpu(1), kernel=KernelFacts("read", (XidFacts(64, 0), XidFacts(48, 0)))
    )
    state = advance(State(), host, NOW)
    return acknowledge(state, "xid.64", "GPU-0", by="ops", reason="card replaced", now=NOW)


def test_state_reads_back_equal(eventful, tmp_path):
    file = StateFile(tmp_path)

    file.save(eventful, "gate")

    assert file.load() == eventful


def test_state_truncated_at_any_byte_is_set_aside_and_said(eventful, tmp_path):
    file = StateFile(tmp_path)
    file.save(eventful, "gate")
    whole = (tmp_path / "state.json").read_bytes()
    end = len(whole.rstrip())

    for length in range(end):
        (tmp_path / "state.json").write_bytes(whole[:length])

        state = file.load()

        assert not state.trusted, length
        assert "set aside" in state.note
        assert not (tmp_path / "state.json").exists()
        for path in tmp_path.glob("*.corrupt-*"):
            path.unlink()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"schema_version": "2", "gpus": {}}',
        b"\xff\xfe",
        b'{"schema_version": "1"}',
        b"[" * 200_000,
    ],
)
def test_state_of_another_form_is_set_aside(content, tmp_path):
    (tmp_path / "state.json").write_bytes(content)

    state = StateFile(tmp_path).load()

    assert (state.trusted, state.gpus) == (False, {})
    assert len(list(tmp_path.glob("*.corrupt-*"))) == 1


def test_state_with_a_wrong_type_inside_is_set_aside(eventful, tmp_path):
    plain = plain_of(eventful, "gate")
    plain["gpus"]["GPU-0"]["aggregate"]["dbe"] = "two"
    (tmp_path / "state.json").write_text(json.dumps(plain))

    assert not StateFile(tmp_path).load().trusted


def test_state_of_the_published_example_is_read(samples):
    example = json.loads((samples / "schema" / "state.example.json").read_text())

    state = state_of(example)

    assert state.gpus["GPU-A"].acks[0].baseline == {"dbe": 1}
    assert state.gpus["GPU-A"].baseline_dbe == 1


def test_state_that_is_written_fits_the_published_schema(eventful, samples):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((samples / "schema" / "state.schema.json").read_text())

    jsonschema.validate(plain_of(eventful, "gate"), schema)


def test_lock_held_by_another_run_is_not_waited_for_long(tmp_path):
    descriptor = os.open(tmp_path / "state.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    with (
        pytest.raises(StateUnavailableError, match="locked by another run"),
        StateFile(tmp_path).locked(0.1),
    ):
        pass
    os.close(descriptor)


def test_run_without_a_place_for_state_warns_and_judges(machine, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    plan = machine.plan("single", {"state_dir": str(tmp_path / "file")})

    report = run(plan, Options(read=lambda _plan, _depth: machine.host()))

    assert report.verdict == "warn"
    assert [result.id for result in report.worst()] == ["gate.state"]


def test_run_catches_growth_across_runs_and_says_a_corrupt_state(machine, tmp_path):
    plan = machine.plan("single", {"state_dir": str(tmp_path)})
    first = Options(read=lambda _plan, _depth: machine.host())
    grown = machine.host(machine.gpu(0, ecc=EccFacts(True, True, 0, 0, 0, 1)), machine.gpu(1))
    second = Options(read=lambda _plan, _depth: grown)

    assert run(plan, first).verdict == "pass"
    assert [result.id for result in run(plan, second).worst()] == ["ecc.dbe.growth"]
    ack(tmp_path, "ecc.dbe.growth", "GPU-0", by="ops", reason="page retired, rebooted")
    assert run(plan, second).verdict == "warn"

    (tmp_path / "state.json").write_bytes(b"{")
    assert "gate.state" in [result.id for result in run(plan, first).worst()]


def test_ack_and_override_leave_a_line_in_the_audit_log(machine, tmp_path):
    override = {
        "check": "ecc.dbe.growth",
        "gpu": "GPU-0",
        "reason": "replacement is ordered",
        "by": "ops",
        "until": datetime.now(UTC).date().isoformat(),
        "bound": 3,
    }
    plan = machine.plan("single", {"state_dir": str(tmp_path), "overrides": [override]})
    grown = machine.host(machine.gpu(0, ecc=EccFacts(True, True, 0, 0, 0, 1)), machine.gpu(1))
    run(plan, Options(read=lambda _plan, _depth: machine.host()))

    report = run(plan, Options(read=lambda _plan, _depth: grown))
    ack(tmp_path, "ecc.dbe.growth", "GPU-0", by="ops", reason="page retired, rebooted")

    lines = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert (report.verdict, report.exit_code) == ("warn", 0)
    assert [line["event"] for line in lines] == ["override", "ack"]
    assert lines[0]["config_sha256"] == "c0ffee"
    assert (lines[0]["status_before"], lines[0]["status_after"]) == ("fail", "warn")


def test_single_check_leaves_no_state(machine, tmp_path):
    plan = machine.plan("single", {"state_dir": str(tmp_path)})

    run(plan, Options(remember=False, names=("ecc",), read=lambda _plan, _depth: machine.host()))

    assert not (tmp_path / "state.json").exists()


def test_hold_names_the_other_owner_and_is_given_back(tmp_path):
    assert hold_gpus(tmp_path, ["GPU-0"], keep=True) == {}
    assert hold_gpus(tmp_path, ["GPU-0"], keep=True) == {}, "its own hold is none of another"
    release_gpus()
    other = os.open(tmp_path / "GPU-0.lock", os.O_RDWR)
    os.pwrite(other, b"pid 7 on box\n".ljust(64), 0)
    fcntl.flock(other, fcntl.LOCK_EX)

    owners = hold_gpus(tmp_path, ["GPU-0", "GPU-1"], keep=False)
    os.close(other)

    assert owners["GPU-0"].startswith("pid 7 on box")
    assert "GPU-1" not in owners
    assert hold_gpus(tmp_path, ["GPU-0"], keep=False) == {}


def test_run_is_refused_while_another_appliance_holds_the_gpu(machine, tmp_path):
    plan = machine.plan("single", {"state_dir": str(tmp_path)})
    tmp_path.mkdir(exist_ok=True)
    other = os.open(tmp_path / "GPU-0.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)

    report = run(plan, Options(read=lambda _plan, _depth: machine.host(), depth=Depth(cuda=False)))
    os.close(other)

    assert [result.id for result in report.worst()] == ["gpu.locked"]
    assert report.exit_code == 20


def test_save_that_fails_keeps_the_old_file(eventful, tmp_path, monkeypatch):
    file = StateFile(tmp_path)
    file.save(eventful, "gate")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateUnavailableError, match="No space left"):
        file.save(replace(eventful, boot_id="b2"), "gate")

    assert file.load() == eventful


@pytest.mark.parametrize("key", ["last_seen", "first_seen"])
@pytest.mark.parametrize("text", ["yesterday", "2026-11-29T12:00:00", ""])
def test_state_with_a_time_that_is_none_is_set_aside(eventful, tmp_path, key, text):
    plain = plain_of(eventful, "gate")
    plain["gpus"]["GPU-0"][key] = text
    (tmp_path / "state.json").write_text(json.dumps(plain))

    assert not StateFile(tmp_path).load().trusted


def test_state_is_never_written_through_a_link(eventful, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "state.json.new").symlink_to(elsewhere)

    StateFile(folder).save(eventful, "gate")

    assert elsewhere.read_text() == "precious"
    assert StateFile(folder).load() == eventful


@pytest.mark.parametrize("name", ["state.json", "HOST_ACTION_REQUIRED", "audit.log"])
def test_pipe_in_place_of_a_file_does_not_stop_the_gate(tmp_path, name):
    os.mkfifo(tmp_path / name)
    file = StateFile(tmp_path)

    if name == "state.json":
        with pytest.raises(StateUnavailableError, match="not a plain file"):
            file.load()
    elif name == "audit.log":
        with pytest.raises(StateUnavailableError):
            file.audit({"event": "ack"})
    else:
        assert "cannot be read" in str(file.required_action("boot"))


def test_action_file_nested_too_deeply_refuses_and_says_so(tmp_path):
    (tmp_path / "HOST_ACTION_REQUIRED").write_text("[" * 200_000)

    assert "cannot be read" in str(StateFile(tmp_path).required_action("boot"))
