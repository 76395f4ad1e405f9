"""The verbs that ask a running appliance or read what it left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from appliance.cli import main
from appliance.commands.doctor import engine_lines
from appliance.commands.status import render_status
from appliance.errors import Fault
from appliance.serve.state import End, Record, Running, StateDirectory, boot_id

STATUS = {
    "phase": "ready",
    "phase_seconds": 12.0,
    "probes": {
        "startup": {"ok": True, "reason": "READY", "detail": ""},
        "ready": {"ok": False, "reason": "NO_PROGRESS", "detail": "x"},
    },
    "model": {"served_name": "quasar", "path": "/models/quasar"},
    "api": {"host": "127.0.0.1", "port": 8000},
    "engine": {"pid": 7, "alive": True, "attempt": 2},
    "safer_settings": ["execution.enforce_eager=true"],
    "canary": {
        "seconds": 1.0,
        "long_prompt_tokens": 128,
        "concurrent": 4,
        "tokens_per_second": 9.5,
    },
    "fault": None,
    "gpu_fault": "error[GPU_ECC] engine: bad, got x; reset it.",
    "requests": {"in_flight": 1, "accepted": 5},
    "recent_ends": 1,
    "config": {"path": "/etc/a.yaml", "sha256": "0", "drift": True},
}

Verb = Callable[..., tuple[int, str, str]]


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> Verb:
    """Run one command line; return exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_status_for_people_says_one_thing_a_line() -> None:
    assert render_status(STATUS) == (
        "phase     ready for 12 s\n"
        "probes    startup ok (READY), ready FAIL (NO_PROGRESS)\n"
        "model     quasar from /models/quasar\n"
        "api       http://127.0.0.1:8000/v1\n"
        "engine    pid 7, alive, start 2\n"
        "requests  1 in flight, 5 accepted\n"
        "canary    9.5 tokens/s with 4 requests, longest prompt 128 tokens\n"
        "safer     execution.enforce_eager=true\n"
        "ends      1 counted by runtime.restart_budget\n"
        "config    /etc/a.yaml was edited; restart to use it\n"
        "error[GPU_ECC] engine: bad, got x; reset it.\n"
    )


@pytest.mark.parametrize("name", ["status", "drain"])
def test_verbs_say_that_nothing_runs(verb: Verb, name: str) -> None:
    code, out, err = verb(name, "--port", "1")

    assert (code, out) == (41, "")
    assert err.startswith("error[NOT_RUNNING] http://127.0.0.1:1/")


@pytest.mark.parametrize(
    "place", [("--url", "http://nowhere"), ("--config", "/nowhere/appliance.yaml")]
)
def test_verbs_say_that_an_address_is_none(verb: Verb, place: tuple[str, str]) -> None:
    code, _, err = verb("status", *place)
    probed, reason, _ = verb("probe", "live", *place)

    assert code == 2
    assert err.startswith("error[ADMIN_ADDRESS]")
    assert probed == 1
    assert reason.startswith("ADDRESS ")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("server: {admin_port: 1, admin_host: 0.0.0.0}", "127.0.0.1:1"),
        ("server: {admin_port: 1}", "127.0.0.1:1"),
    ],
)
def test_probe_takes_the_address_from_a_configuration(
    verb: Verb, tmp_path: Path, text: str, address: str
) -> None:
    path = tmp_path / "appliance.yaml"
    path.write_text(f"version: 1\nmodel: {{path: /models/x}}\n{text}\n")

    code, out, _ = verb("probe", "ready", "--config", str(path))

    assert (code, out) == (1, f"UNREACHABLE {address}: Connection refused\n")


def test_probe_verb_imports_nothing_heavy(repository: Path) -> None:
    code = (
        "import sys; from appliance.cli import main; main(['probe', 'ready', '--port', '1']);"
        "print([m for m in ('pydantic', 'yaml', 'http.client', 'asyncio', 'prometheus_client')"
        " if m in sys.modules])"
    )

    done = subprocess.run(
        (sys.executable, "-c", code), cwd=repository, capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines()[-1] == "[]"


def test_doctor_reads_an_engine_log(verb: Verb, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("INFO x\nRuntimeError: CUDA error: no kernel image is available\n")

    code, out, _ = verb("doctor", "--log", str(log), "--json")

    assert code == 0
    assert json.loads(out)["code"] == "NO_KERNEL_IMAGE"


def test_doctor_reads_what_the_last_run_left(verb: Verb, tmp_path: Path) -> None:
    last = {"lines": ["nothing to see"], "returncode": -7, "message": "error[ENGINE_DIED] x"}
    (tmp_path / "last_run.json").write_text(json.dumps(last))

    code, out, _ = verb("doctor", "--state-dir", str(tmp_path))

    assert code == 0
    assert out.startswith("SHM_TOO_SMALL: ")
    assert "the run said: error[ENGINE_DIED] x" in out


def test_doctor_without_a_name_for_it_ends_with_1(verb: Verb, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("INFO all is well\n")

    code, out, _ = verb("doctor", "--log", str(tmp_path / "log"), "--exit-code", "3")

    assert code == 1
    assert out.startswith("ENGINE_FAILED: ")
    assert "exit status 3" in out


def test_doctor_without_a_log_is_a_usage_error(verb: Verb, tmp_path: Path) -> None:
    code, _, err = verb("doctor", "--state-dir", str(tmp_path))

    assert code == 2
    assert err.startswith("error[NO_LOG]")


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("", "nothing in it"),
        (" \n\n", "nothing in it"),
        ("version: 1\nlogging: {format: json, level: INFO}\n", "2 lines and none of a log"),
        ("\x00\x01ELF", "1 lines and none of a log"),
    ],
    ids=["empty", "blank", "YAML", "binary"],
)
def test_doctor_on_a_file_that_is_no_log_says_so(
    verb: Verb, tmp_path: Path, content: str, value: str
) -> None:
    path = tmp_path / "file"
    path.write_text(content)

    code, out, err = verb("doctor", "--log", str(path))

    assert (code, out) == (2, "")
    assert err.startswith(f"error[NO_LOG] {path}: must be the log of an engine, got {value};")


def write_last(folder: Path, fault: Fault, exit_code: int, lines: list[str], at: float) -> None:
    last = {"at": at, "exit_code": exit_code, "code": fault.code, "message": str(fault)}
    last |= {"fault": asdict(fault), "returncode": -9, "lines": lines}
    (folder / "last_run.json").write_text(json.dumps(last))


LATE = Fault("DRAIN_TIMEOUT", "drain", "requests must end within 1 s", "2 in flight", "raise it")
STILL = Fault("ENGINE_STALLED", "engine", "it must move", "none for 5 s; UNKNOWN: x", "a; b")
SHUT = Fault("ENGINE_DIED", "engine", "the engine must keep its port open", "it closed 5 s", "a")
NO_CANARY = Fault("CANARY_NAN", "engine", "the answers must be numbers", "NaN", "b")
NOISE = [
    'INFO:     127.0.0.1:50000 - "GET /metrics HTTP/1.1" 200 OK',
    "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: x",
    "  warnings.warn('resource_tracker: There appear to be %d '",
]


@pytest.mark.parametrize(
    ("fault", "exit_code", "line"),
    [
        (LATE, 50, "ERROR Worker proc VllmWorker-0 died unexpectedly"),
        (STILL, 43, "INFO last"),
        (SHUT, 41, "INFO last"),
        (NO_CANARY, 40, "INFO last"),
    ],
    ids=["drain", "stall", "port", "canary"],
)
def test_doctor_names_what_the_appliance_ended_the_engine_for(
    verb: Verb, tmp_path: Path, fault: Fault, exit_code: int, line: str
) -> None:
    write_last(tmp_path, fault, exit_code, [line, *NOISE], at=100.0)

    code, out, _ = verb("doctor", "--state-dir", str(tmp_path), "--json")

    found = json.loads(out)
    assert (code, found["code"], found["what"]) == (0, fault.code, fault.what)
    assert (found["fix"], found["evidence"]) == (fault.fix, [fault.value])
    assert found["lines"] == [line]


def test_doctor_prints_the_last_lines_of_an_engine_that_ended_by_itself(
    verb: Verb, tmp_path: Path
) -> None:
    died = Fault("ENGINE_DIED", "engine", "must run until it is told to stop", "x", "y")
    lines = [f"INFO line {n}" for n in range(20)]
    write_last(tmp_path, died, 41, [*lines, *NOISE], at=100.0)

    code, out, _ = verb("doctor", "--state-dir", str(tmp_path))

    assert code == 1
    assert out.startswith("ENGINE_FAILED: the engine ended by itself\n  evidence: INFO line 19\n")
    assert out.endswith("the engine's last lines:\n    " + "\n    ".join(lines[-10:]) + "\n")


def test_doctor_takes_the_cause_out_of_the_log_of_the_container(verb: Verb, tmp_path: Path) -> None:
    events = '{"time": "t", "level": "info", "event": "engine", "line": "INFO serving"}'
    (tmp_path / "log").write_text(f"{events}\n{LATE}\n")

    code, out, _ = verb("doctor", "--log", str(tmp_path / "log"), "--json")

    found = json.loads(out)
    assert (code, found["code"], found["evidence"]) == (0, "DRAIN_TIMEOUT", ["2 in flight"])
    assert found["lines"] == ["INFO serving"]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (Record(running=Running(200.0, boot_id())), "UNCLEAN_STOP"),
        (Record(running=Running(200.0, "another boot")), "UNCLEAN_REBOOT"),
        (Record(ends=(End(200.0, 0, "UNCLEAN_STOP"),)), "UNCLEAN_STOP"),
        (Record(ends=(End(50.0, 0, "UNCLEAN_STOP"),)), "DRAIN_TIMEOUT"),
        (Record(), "DRAIN_TIMEOUT"),
    ],
    ids=["killed", "host down", "found by the next start", "long ago", "clean"],
)
@pytest.mark.parametrize("older", [True, False], ids=["with older lines", "without"])
def test_doctor_names_a_run_that_was_killed_after_the_lines_it_has(
    verb: Verb, tmp_path: Path, record: Record, expected: str, older: bool
) -> None:
    directory = StateDirectory(tmp_path)
    directory.save(record)
    if older or expected == "DRAIN_TIMEOUT":
        write_last(tmp_path, LATE, 50, ["INFO x"], at=100.0)
    if record.running is not None:
        assert verb("doctor", "--state-dir", str(tmp_path))[0] == (0 if older else 2)  # it runs
    directory.close()

    code, out, _ = verb("doctor", "--state-dir", str(tmp_path), "--json")

    assert (code, json.loads(out)["code"]) == (0, expected)
    assert StateDirectory(tmp_path).load() == record


def test_engine_lines_are_taken_out_of_either_form_of_the_event_log() -> None:
    text = "\n".join(
        (
            '{"time": "t", "level": "info", "event": "engine", "line": "from json"}',
            '{"time": "t", "level": "info", "event": "serve.ready", "url": "x"}',
            '2026-11-29T12:00:00.005Z INFO engine line="from text"',
            "2026-11-29T12:00:00.005Z INFO engine line=plain",
            "{broken",
            "as it is",
        )
    )

    assert engine_lines(text) == ("from json", "from text", "plain", "{broken", "as it is")


NOTICE = (
    "INFO [shm_broadcast.py:501] No available shared memory broadcast block found in 60 seconds"
)


@pytest.mark.parametrize(
    "form",
    [
        "error[{}] engine: rank 1 was looked at, got LINE; do it.",
        "error[ENGINE_STALLED] engine: must move, got 120 s (x); {}: rank 1 spins; do it.",
    ],
    ids=["while it started", "while it served"],
)
@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("WORKER_DEAD", 0),
        ("STALLED_COLLECTIVE", 0),
        ("COMPILING", 0),
        ("STUCK_KERNEL", 0),
        ("UNKNOWN", 1),
    ],
)
def test_rc_011_doctor_names_what_was_seen_behind_the_notice(
    verb: Verb, tmp_path: Path, form: str, code: str, exit_code: int
) -> None:
    said = form.format(code)
    last = {"lines": ["INFO x", NOTICE], "returncode": -9, "message": said}
    (tmp_path / "last_run.json").write_text(json.dumps(last))

    done, out, _ = verb("doctor", "--state-dir", str(tmp_path), "--json")

    found = json.loads(out)
    assert (done, found["code"]) == (exit_code, code)
    assert found["evidence"] == [NOTICE, said]


def test_rc_011_doctor_on_a_log_alone_admits_that_it_cannot_tell(
    verb: Verb, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(f"INFO x\n{NOTICE}\nINFO y\n")

    code, out, _ = verb("doctor", "--log", str(tmp_path / "log"), "--json")

    assert (code, json.loads(out)["code"], json.loads(out)["evidence"]) == (1, "UNKNOWN", [NOTICE])
