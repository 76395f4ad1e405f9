"""The whole line over the stand-in engine: kills, hangs, hardware faults and the restart budget."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from appliance.serve import procfs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Running, Start


@contextlib.contextmanager
def completion(running: Running, **body: object) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    text = json.dumps({"model": "tiny", "prompt": "Hello", **body})
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            yield response


def ask_in_vain(running: Running) -> None:
    """Ask an engine that will be killed before it answers."""
    with pytest.raises((OSError, http.client.HTTPException)), completion(running):
        pass


def parent_of(pid: int) -> int:
    return next(row.parent for row in procfs.table() if row.pid == pid)


def test_kill_9_of_the_supervisor_leaves_no_process(start: Start) -> None:
    running = start()
    running.wait_for("ready", 200)
    assert len(running.family()) >= 4  # guard, API server, core, worker

    running.stop(signal.SIGKILL)

    assert running.wait() == -signal.SIGKILL
    running.assert_nothing_left()


def test_kill_9_of_the_engine_ends_with_41_and_leaves_no_process(start: Start) -> None:
    running = start()
    running.wait_for("ready", 200)
    running.family()

    os.kill(running.engine_pid(), signal.SIGKILL)

    assert running.wait(20) == 41
    assert "error[ENGINE_DIED]" in running.log.read_text()
    assert running.named("engine.end")[0]["returncode"] == -9
    running.assert_nothing_left()


def test_rc_042_kill_9_of_the_core_ends_with_41_although_the_engine_ends_with_0(
    start: Start,
) -> None:
    running = start()
    running.wait_for("ready", 200)
    running.family()
    engine = running.engine_pid()
    core = next(row.pid for row in procfs.table() if row.parent == engine)

    os.kill(core, signal.SIGKILL)

    assert running.wait(20) == 41
    assert running.named("engine.end")[0]["returncode"] == 0
    running.assert_nothing_left()


def test_kill_9_of_the_guard_ends_with_41_and_leaves_no_process(start: Start) -> None:
    running = start()
    running.wait_for("ready", 200)
    running.family()
    guard = parent_of(running.engine_pid())
    assert parent_of(guard) == running.process.pid

    os.kill(guard, signal.SIGKILL)

    assert running.wait(20) == 41
    running.assert_nothing_left()


def test_stopped_engine_is_not_ready_then_not_alive_then_ends_with_43(start: Start) -> None:
    running = start(stall="4s")
    running.wait_for("ready", 200)
    running.family()

    os.kill(running.engine_pid(), signal.SIGSTOP)
    stopped = time.monotonic()
    not_ready = running.wait_for("ready", 503)
    not_ready_s = time.monotonic() - stopped
    code = running.wait(30)

    assert not_ready == "NO_PROGRESS"
    assert not_ready_s < 4.0
    assert code == 43
    assert time.monotonic() - stopped < 4.0 + 4.0
    assert "error[ENGINE_STALLED]" in running.log.read_text()
    running.assert_nothing_left()


def test_rc_040_rc_043_hanging_answers_under_a_healthy_health_route_end_with_43(
    start: Start,
) -> None:
    running = start(stall="2s")
    running.wait_for("ready", 200)

    running.behave(mode="hang")
    caller = threading.Thread(target=ask_in_vain, args=(running,))
    caller.start()

    assert running.wait(30) == 43
    caller.join(10)
    assert running.get("/health", port=running.port)[0] == 0


def test_rc_041_busy_engine_with_slow_metrics_never_fails(start: Start) -> None:
    running = start(stall="2s")
    running.wait_for("ready", 200)
    running.behave(metrics_s=0.15, token_s=0.05, tokens=160)

    answer: list[int] = []

    def call() -> None:
        with completion(running) as response:
            answer.append(response.status)

    caller = threading.Thread(target=call)
    caller.start()
    seen: set[tuple[int, str]] = set()
    while caller.is_alive():
        seen |= {running.probe("live"), running.probe("ready")}

    assert answer == [200]
    assert seen == {(200, "READY")}


def test_idle_engine_is_left_alone_for_many_stall_times(start: Start) -> None:
    running = start(stall="1s")
    running.wait_for("ready", 200)
    until = time.monotonic() + 5.0

    seen: set[tuple[int, str]] = set()
    while time.monotonic() < until:
        seen |= {running.probe("live"), running.probe("ready")}

    assert seen == {(200, "READY")}


def test_client_that_does_not_read_its_answer_is_no_stall(start: Start) -> None:
    running = start(stall="1s", behave={"tokens": 200_000})
    running.wait_for("startup", 200)
    running.behave(tokens=24)
    running.wait_for("ready", 200)
    running.behave(tokens=200_000)
    seen: set[tuple[int, str]] = set()

    with completion(running, stream=True):
        running.behave(tokens=24)
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            seen |= {running.probe("live")}
        in_flight = running.status()["requests"]["in_flight"]

    assert in_flight == 1
    assert seen == {(200, "READY")}


def test_gpu_fault_named_by_a_dying_engine_ends_with_42(start: Start) -> None:
    line = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    running = start(behave={"log": [line], "exit": 1})

    assert running.wait() == 42
    assert "error[GPU_ECC]" in running.log.read_text()
    assert len(running.named("engine.start")) == 1


def test_restart_budget_refuses_the_next_start_and_holds_the_one_after(start: Start) -> None:
    for _ in range(2):
        crashing = start(budget=2, behave={"log": ["boom"], "exit": 3})
        assert crashing.wait() == 40

    refused = start(budget=2)
    assert refused.wait() == 41
    assert "error[RESTART_BUDGET]" in refused.log.read_text()
    assert refused.named("engine.start") == []

    held = start(budget=2)
    reason = held.wait_for("startup", 503)
    live = held.probe("live")
    assert held.process.poll() is None
    held.stop()

    assert reason == "RESTART_BUDGET"
    assert live == (200, "RESTART_BUDGET")
    assert held.wait(10) == 0
    assert "error[" not in held.log.read_text()


def test_killed_run_is_noted_by_the_next_one(start: Start) -> None:
    first = start()
    first.wait_for("ready", 200)
    first.family()
    first.stop(signal.SIGKILL)
    first.wait()
    first.assert_nothing_left()

    second = start()
    second.wait_for("ready", 200)

    assert len(second.named("serve.unclean_stop")) == 1
    assert second.status()["recent_ends"] == 1
