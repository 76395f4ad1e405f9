"""The loop around the machine, with the world around it given by hand; no engine is started."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from appliance.errors import ExitCode, Fault
from appliance.gate.defaults import plain_section
from appliance.plan.adjustments import NO_ADJUSTMENTS
from appliance.serve.board import Board
from appliance.serve.client import EngineClient
from appliance.serve.diagnose import Observation
from appliance.serve.events import EventLog
from appliance.serve.gpus import GpuWatch
from appliance.serve.machine import Phase
from appliance.serve.outside import GateOutcome, Launch, Outside
from appliance.serve.supervisor import Supervisor
from healthchecks.sampler import Sampler

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.serve.ladder import Settings

FAULT = Fault("GATE_FAILED", "gpu:GPU-aaaa ecc.dbe.volatile", "must be 0", "3", "reset the GPU")
REFUSED = GateOutcome(ExitCode.GATE_FAILED, FAULT, NO_ADJUSTMENTS, {"verdict": "fail"})
NO_GPUS = Sampler(plain_section(), (), 15.0)
PASSED = GateOutcome(ExitCode.OK, None, NO_ADJUSTMENTS, {"verdict": "pass"})


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    """A world in which the gate refuses and nothing may be launched."""

    def never(_settings: Settings) -> Launch:
        pytest.fail("nothing may be launched")

    return Outside(
        log=EventLog("json", "info", stream=io.StringIO()),
        board=Board.create(tmp_path / "board"),
        client=EngineClient("127.0.0.1", 1, "token"),
        gate=lambda: REFUSED,
        launch=never,
        observe=Observation,
        config_sha256=lambda: "0" * 64,
        watch_gpus=lambda _on_fault, _stalled_s: GpuWatch(NO_GPUS),
        oom_kills=lambda: 0,
    )


SettingsMaker = Callable[..., Any]


def test_refused_gate_ends_with_its_code_and_launches_nothing(
    settings: SettingsMaker, outside: Outside
) -> None:
    supervisor = Supervisor(settings(), outside)

    ended = supervisor.run()

    assert (ended.exit_code, ended.fault) == (ExitCode.GATE_FAILED, FAULT)
    assert supervisor.snapshot.gate == {"verdict": "fail"}
    assert supervisor.snapshot.state.phase is Phase.STOPPED


def test_gate_that_hangs_leaves_the_loop_turning_and_a_stop_ends_it(
    settings: SettingsMaker, outside: Outside
) -> None:
    release = threading.Event()

    def hang() -> GateOutcome:
        release.wait(30)
        return PASSED

    supervisor = Supervisor(settings(), replace(outside, gate=hang))
    threading.Timer(0.5, supervisor.request_stop).start()
    began = time.monotonic()

    ended = supervisor.run()
    release.set()

    assert ended.exit_code is ExitCode.OK
    assert time.monotonic() - began < 5.0
    assert supervisor.beat_age_s() < 1.0


def test_stop_that_came_before_the_run_ends_it_without_a_launch(
    settings: SettingsMaker, outside: Outside
) -> None:
    supervisor = Supervisor(settings(), replace(outside, gate=lambda: time.sleep(1) or PASSED))
    supervisor.request_stop()

    assert supervisor.run().exit_code is ExitCode.OK


def test_failure_of_the_appliance_itself_ends_the_run(
    settings: SettingsMaker, outside: Outside
) -> None:
    def broken(_settings: Settings) -> Launch:
        raise LookupError("no such renderer")

    supervisor = Supervisor(settings(), replace(outside, gate=lambda: PASSED, launch=broken))

    with pytest.raises(LookupError, match="no such renderer"):
        supervisor.run()


def test_failure_of_a_thread_ends_the_run(settings: SettingsMaker, outside: Outside) -> None:
    def broken() -> GateOutcome:
        raise LookupError("no such check")

    with pytest.raises(LookupError, match="no such check"):
        Supervisor(settings(), replace(outside, gate=broken)).run()


def test_edited_configuration_is_noticed_and_named(
    settings: SettingsMaker, outside: Outside
) -> None:
    stream = io.StringIO()
    drifted = replace(
        outside,
        log=EventLog("json", "info", stream=stream),
        config_sha256=lambda: "f" * 64,
        gate=lambda: time.sleep(0.5) or REFUSED,
    )
    supervisor = Supervisor(settings(), drifted)

    supervisor.run()

    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [each["event"] for each in events].count("config.drift") == 1
    assert supervisor.snapshot.config_drift


def test_refusal_before_the_loop_is_shown_and_held_until_a_stop(
    settings: SettingsMaker, outside: Outside
) -> None:
    supervisor = Supervisor(settings(), outside)
    supervisor.refuse(ExitCode.ENGINE_DIED, FAULT)

    unstopped = supervisor.hold(0.3)
    supervisor.request_stop()
    stopped = supervisor.hold(30.0)

    assert (unstopped, stopped) == (False, True)
    assert supervisor.snapshot.state.fault == FAULT
