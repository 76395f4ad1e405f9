"""One service from start to stop over the real engine: load, answer, hang, die, come back, drain.

The tests build on each other in this order, since each start of the engine costs half a minute.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

STALL_S = 20
LOAD_S = 420.0
"""A start of the engine, on a machine that has other work."""

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("loading")]


Probes = tuple[tuple[int, str], tuple[int, str], tuple[int, str]]
"""Code and reason of startup, ready and live, asked at one time."""


@dataclass
class Loading:
    """What the probes said from the first container to health; `frozen` while nothing loaded."""

    seen: list[Probes] = field(default_factory=list)
    frozen: list[Probes] = field(default_factory=list)


@pytest.fixture(scope="module")
def loading(service: Any) -> Loading:
    """Start the stack and note what the probes say until it is ready.

    On the way the engine's processes are stopped for longer than `runtime.stall`, as if the disk
    gave nothing: a load that slow must be waited for.
    """
    service.configure(
        service.configuration(
            runtime={"stall": f"{STALL_S}s"}, gate={"state_dir": "/var/lib/appliance"}, logging={}
        )
    )
    outcome: list = []
    waiting = threading.Thread(target=lambda: outcome.append(service.compose(*UP, limit_s=LOAD_S)))
    waiting.start()
    noted = Loading()
    while waiting.is_alive():
        noted.seen.append(probes(service))
        if not noted.frozen and noted.seen[-1][0][0] == 200 and (pids := engine_pids(service)):
            noted.frozen.extend(_freeze(service, pids))
        time.sleep(0.3)
    waiting.join()
    assert outcome[0].returncode == 0, outcome[0].stdout + outcome[0].stderr
    return noted


def _freeze(service: Any, pids: list[int]) -> list[Probes]:
    """Stop processes for longer than the stall time; return what the probes said meanwhile."""
    for pid in pids:
        send(service, signal.SIGSTOP, pid)
    until, seen = time.monotonic() + STALL_S + 3, []
    while time.monotonic() < until:
        seen.append(probes(service))
        time.sleep(1)
    for pid in pids:
        send(service, signal.SIGCONT, pid)
    return seen


def probes(service: Any) -> Probes:
    return service.probe("startup"), service.probe("ready"), service.probe("live")


UP = ("up", "--detach", "--wait", "--wait-timeout", str(int(LOAD_S)))


def test_up_wait_returns_when_the_engine_is_healthy(service: Any) -> None:
    state = service.state()

    assert state["Health"]["Status"] == "healthy"
    assert service.state("gate")["ExitCode"] == 0
    assert service.probe("ready") == (200, "READY")


def test_loading_is_startup_and_live_but_not_ready(loading: Loading) -> None:
    answered = [seen for seen in loading.seen if all(code for code, _ in seen)]
    before = [seen for seen in answered if seen[1][0] == 503]
    said = [startup for startup, _, _ in before]
    judging = [startup for startup in said if startup[1] == "GATING"]

    assert len(before) - len(judging) >= 3
    assert {live[0] for _, _, live in before} == {200}
    # Until the gate has decided startup says no; then nothing is said twice.
    assert said[: len(judging)] == judging == [(503, "GATING")] * len(judging)
    assert {code for code, _ in said[len(judging) :]} == {200}


def test_slow_load_is_waited_for(service: Any, loading: Loading) -> None:
    assert len(loading.frozen) >= 3
    assert all(
        (startup[0], ready[0], live[0]) == (200, 503, 200)
        for startup, ready, live in loading.frozen
    )
    assert service.container().attrs["RestartCount"] == 0


def test_chat_answers_over_the_published_port(service: Any) -> None:
    answer = service.chat("What is the capital of France?", max_tokens=16, temperature=0)

    assert answer.status_code == 200
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


def test_chat_streams_in_many_parts(service: Any) -> None:
    parts = list(stream(service, max_tokens=12))

    assert len(parts) >= 10
    assert "".join(parts).strip()


def stream(service: Any, *, max_tokens: int, **settings: object):
    """Yield the pieces of one streamed answer; a cut one raises."""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Tell a long story about the sea."}],
        "max_tokens": max_tokens,
        "stream": True,
        **settings,
    }
    url = f"http://127.0.0.1:{service.port}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                return
            if data:
                yield json.loads(data)["choices"][0]["delta"].get("content") or ""
    pytest.fail("the stream ended without [DONE]")


def test_container_writes_nothing_outside_its_volumes(service: Any) -> None:
    assert service.container().diff() in (None, [])


def test_container_is_confined_as_compose_says(service: Any) -> None:
    host = service.container().attrs["HostConfig"]

    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["LogConfig"]["Config"] == {"max-file": "5", "max-size": "20m"}
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert host["ShmSize"] == 16 * 1024**3
    ports = {port["HostIp"] for listed in host["PortBindings"].values() for port in listed}
    assert ports == {"127.0.0.1"}


def test_drain_may_not_be_asked_for_through_the_published_port(service: Any) -> None:
    answer = httpx.post(f"http://127.0.0.1:{service.admin_port}/drain", timeout=5)

    assert (answer.status_code, answer.json()["reason"]) == (403, "NOT_FROM_THIS_HOST")


def test_edited_configuration_is_seen_by_the_running_container(service: Any) -> None:
    path = service.config / "appliance.yaml"
    before = path.read_text()
    edited = path.with_suffix(".new")
    edited.write_text(before.replace('"max_num_seqs": 4', '"max_num_seqs": 2'))
    edited.replace(path)  # as an editor does: another inode under the same name

    service.until(lambda: status(service)["config"]["drift"], "drift", 30)
    path.write_text(before)
    service.until(lambda: not status(service)["config"]["drift"], "no drift", 30)


def status(service: Any) -> dict:
    return httpx.get(f"http://127.0.0.1:{service.admin_port}/status", timeout=5).json()


def test_rc_043_hung_engine_turns_unready_then_dead_and_the_container_comes_back(
    service: Any,
) -> None:
    for pid in engine_pids(service):
        send(service, signal.SIGSTOP, pid)
    started = service.state()["StartedAt"]
    with asking_live_closely(service) as lives:
        seen: list[Probes] = []

        def restarted() -> bool:
            seen.append(probes(service))
            return service.state()["StartedAt"] != started

        service.until(restarted, "a restart", 120)

    # live fails when the stall time is over, so ready turned within it.
    turns = [(ready[1], live[0]) for _, ready, live in seen if ready[0] == 503 and live[0]]
    assert ("NO_PROGRESS", 200) in turns, turns
    assert (503, "ENGINE_STALLED") in lives, lives
    assert '"exit_code": 43' in log(service)
    assert "error[ENGINE_STALLED]" in log(service)
    service.wait_ready()
    assert service.container().attrs["RestartCount"] == 1


@contextlib.contextmanager
def asking_live_closely(service: Any) -> Iterator[list[tuple[int, str]]]:
    """Note each new answer of live, asked every 20 ms: the exit follows its failing in 0.3 s."""
    answers: list[tuple[int, str]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.02):
            answer = service.probe("live")
            if not answers or answers[-1] != answer:
                answers.append(answer)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield answers
    finally:
        over.set()
        asking.join()


def engine_pids(service: Any) -> list[int]:
    """Return the engine's worker processes inside the container, not the API server; maybe none."""
    script = (
        "import os\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try: name = open(f'/proc/{pid}/comm').read() + open(f'/proc/{pid}/cmdline').read()\n"
        "    except OSError: continue\n"
        "    if 'EngineCore' in name or 'Worker' in name: print(pid)\n"
    )
    code, output = service.exec("python", "-I", "-c", script)
    assert code == 0, output
    return [int(word) for word in output.split()]


def send(service: Any, number: signal.Signals, pid: int) -> None:
    """Send a signal inside the container, which has no `kill`."""
    script = (
        "import contextlib, os\n"
        f"with contextlib.suppress(ProcessLookupError): os.kill({pid}, {int(number)})"
    )
    code, output = service.exec("python", "-I", "-c", script)
    assert code == 0, output


def log(service: Any) -> str:
    return service.container().logs().decode(errors="replace")


def test_rc_042_killed_engine_ends_the_container_in_41_and_it_comes_back(service: Any) -> None:
    service.wait_ready()  # whatever became of the test before
    restarts = service.container().attrs["RestartCount"]
    for pid in engine_pids(service):
        send(service, signal.SIGKILL, pid)
    service.until(
        lambda: service.container().attrs["RestartCount"] == restarts + 1, "a restart", 90
    )

    assert "error[ENGINE_DIED]" in log(service)
    assert '"exit_code": 41' in log(service)
    service.wait_ready()


def test_down_lets_a_stream_in_flight_finish_and_ends_in_0(service: Any) -> None:
    parts: list[str] = []
    failures: list[BaseException] = []

    def read() -> None:
        try:
            parts.extend(stream(service, max_tokens=160, ignore_eos=True))
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    reader = threading.Thread(target=read)
    outcome: list = []
    stopping = threading.Thread(target=lambda: outcome.append(service.compose("down")))
    engine, began = service.container().id, int(time.time())
    reader.start()
    service.until(lambda: status(service)["requests"]["in_flight"] == 1, "a stream in flight", 30)
    stopping.start()
    seen = []
    while stopping.is_alive():
        seen.append(probes(service))
        time.sleep(0.1)
    reader.join(timeout=120)

    assert outcome[0].returncode == 0, outcome[0].stderr
    assert not failures
    assert len(parts) >= 150
    draining = [(startup[0], ready, live[0]) for startup, ready, live in seen if live[0]]
    assert (200, (503, "DRAINING"), 200) in draining, draining
    assert exit_codes(service, engine, began) == ["0"]


def exit_codes(service: Any, container: str, since: int) -> list[str]:
    """Return how a container ended, from the engine's own journal: `down` leaves nothing else."""
    told = service.client.events(
        since=since, until=int(time.time()) + 1, decode=True, filters={"container": container}
    )
    return [event["Actor"]["Attributes"]["exitCode"] for event in told if event["Action"] == "die"]
