"""What one run keeps for the next, and what it refuses before it begins."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.serve import run as serve_run
from appliance.serve.admin import AdminServer, check_port_free
from appliance.serve.events import EventLog
from appliance.serve.outside import Ended
from appliance.serve.run import check_keys, hold_back
from appliance.serve.signals import StopSignals
from appliance.serve.state import End, Record, Running, StateDirectory

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.plan.launch_plan import LaunchPlan

FAULT = Fault("GATE_FAILED", "gpu 0", "must be 0", "3", "reset the GPU")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StateDirectory]:
    """A state directory of this test."""
    made = StateDirectory(tmp_path / "state")
    yield made
    made.close()


@pytest.fixture
def stop_signals() -> Iterator[StopSignals]:
    """Signals taken for one test and given back."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    # Tests that are started by nohup begin with SIGHUP ignored, which StopSignals would keep.
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield StopSignals()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def run_of(plan: LaunchPlan, directory: StateDirectory, stop: StopSignals) -> serve_run._Run:
    return serve_run._Run(plan, EventLog("json", "error"), directory, stop)


def test_first_refusal_is_said_at_once_and_the_next_is_held_back(directory: StateDirectory) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return False

    first = hold_back(directory, FAULT, wait)
    second = hold_back(directory, FAULT, wait)
    other = hold_back(directory, replace(FAULT, code="GATE_UNKNOWN"), wait)

    assert (first, second, other) == (False, False, False)
    assert len(waits) == 1
    assert 55.0 < waits[0] <= 60.0


def test_refusal_that_is_stopped_while_held_back_was_not_said(directory: StateDirectory) -> None:
    directory.save(Record(refusal=End(0.0, 0, "OTHER")))
    hold_back(directory, FAULT, lambda _seconds: False)
    said = directory.load().refusal

    stopped = hold_back(directory, FAULT, lambda _seconds: True)

    assert stopped
    assert directory.load().refusal == said


@pytest.mark.parametrize(
    ("code", "counted"),
    [
        (ExitCode.OK, False),
        (ExitCode.DRAIN_TIMEOUT, False),
        (ExitCode.GATE_FAILED, False),
        (ExitCode.ENGINE_START, True),
        (ExitCode.ENGINE_DIED, True),
        (ExitCode.GPU_FAULT, True),
        (ExitCode.STALLED, True),
    ],
)
def test_only_ends_that_nobody_asked_for_are_counted(
    plan: Callable[..., LaunchPlan],
    directory: StateDirectory,
    stop_signals: StopSignals,
    code: ExitCode,
    counted: bool,
) -> None:
    directory.save(Record(running=Running(1.0, "boot")))
    fault = None if code is ExitCode.OK else FAULT

    serve_run._finish(run_of(plan(), directory, stop_signals), Ended(code, fault))

    record = directory.load()
    assert record.running is None
    assert [end.exit_code for end in record.ends] == ([int(code)] if counted else [])


def test_end_leaves_the_engines_last_lines_for_the_doctor(
    plan: Callable[..., LaunchPlan], directory: StateDirectory, stop_signals: StopSignals
) -> None:
    ended = Ended(ExitCode.ENGINE_DIED, FAULT, tail=("last", "lines"), returncode=0)

    serve_run._finish(run_of(plan(), directory, stop_signals), ended)

    kept = json.loads((directory.path / "last_run.json").read_text())
    assert (kept["lines"], kept["returncode"], kept["exit_code"]) == (["last", "lines"], 0, 41)


def test_process_that_cannot_be_killed_makes_the_next_start_refuse(
    plan: Callable[..., LaunchPlan], directory: StateDirectory, stop_signals: StopSignals
) -> None:
    run = run_of(plan(), directory, stop_signals)
    ended = Ended(ExitCode.STALLED, FAULT, leftover=(f"{os.getpid()}:D",))

    serve_run._finish(run, ended)
    refusal = serve_run._refusal(run, directory.load())

    assert refusal is not None
    assert refusal[0] is ExitCode.GATE_FAILED
    assert refusal[1].code == "HOST_ACTION_REQUIRED"


WITHOUT_SPACE = """
import resource, sys
from pathlib import Path
from appliance.errors import ApplianceError, Fault, ExitCode
from appliance.serve import run
from appliance.serve.board import Board
from appliance.serve.outside import Ended
from appliance.serve.state import StateDirectory

directory = StateDirectory(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
fault = Fault("GATE_FAILED", "gpu 0", "must be 0", "3", "reset the GPU")
print(run.hold_back(directory, fault, lambda seconds: False))
try:
    with run._writable(directory):
        Board.create(directory.run / "board")
except ApplianceError as error:
    print(int(error.exit_code), error)
"""


def test_directory_without_space_is_refused_and_hides_no_other_refusal(
    tmp_path: Path, repository: Path
) -> None:
    done = subprocess.run(
        (sys.executable, "-c", WITHOUT_SPACE, tmp_path / "state"),
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    held, refused = done.stdout.splitlines()
    assert held == "False"
    assert refused.startswith(
        f"12 error[STATE_DIR] gate.state_dir {tmp_path}/state: must take small"
    )


@pytest.mark.parametrize("content", [None, "", "# only a remark\n", b"\xff\xfe"])
def test_key_file_without_a_key_is_refused(
    plan: Callable[..., LaunchPlan], tmp_path: Path, content: str | bytes | None
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    with pytest.raises(ApplianceError) as refused:
        check_keys(plan(server={"api_keys_file": str(path)}))

    assert refused.value.exit_code is ExitCode.CONFIG
    assert refused.value.faults[0].code == "API_KEYS_FILE"


def test_signals_that_came_early_reach_the_listener(stop_signals: StopSignals) -> None:
    heard: list[int] = []
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)

    stop_signals.listen(lambda: heard.append(1))
    signal.raise_signal(signal.SIGHUP)

    assert stop_signals.came
    assert heard == [1, 1, 1]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_taken_port_is_named_with_its_key(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as holder:
        try:
            holder.bind((host, 0))
        except OSError:
            assert host == "::1", "this machine has no IPv6 loopback; IPv4 must work"
            return
        holder.listen()
        port = holder.getsockname()[1]

        with pytest.raises(ApplianceError) as api:
            check_port_free(host, port)
        with pytest.raises(ApplianceError) as admin:
            AdminServer(host, port)

    assert api.value.exit_code is admin.value.exit_code is ExitCode.CONTAINER
    assert str(api.value).startswith(f"error[PORT_UNAVAILABLE] server.port {host}:{port}:")
    assert str(admin.value).startswith(f"error[PORT_UNAVAILABLE] server.admin_port {host}:{port}:")


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ApplianceError) as refused:
        check_port_free("192.0.2.1", 8000)

    assert refused.value.exit_code is ExitCode.CONTAINER


def test_rc_025_reboot_under_the_last_run_is_a_warning_and_said_once(
    plan: Callable[..., LaunchPlan],
    directory: StateDirectory,
    stop_signals: StopSignals,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory.save(Record(running=Running(1.0, "another boot")))
    run = replace(run_of(plan(), directory, stop_signals), log=EventLog("json", "warning"))

    record = serve_run._begin(run)
    serve_run._begin(run)

    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("UNCLEAN_REBOOT") == 1
    assert (record.running, record.ends) == (None, ())
