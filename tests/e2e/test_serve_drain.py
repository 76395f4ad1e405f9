"""The whole line over the stand-in engine: draining, limits and keys with real clients."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Running, Start


class Stream:
    """A client that reads a streamed completion on a thread of its own."""

    def __init__(self, running: Running, max_tokens: int = 10_000) -> None:
        self.events: list[str] = []
        self._until = running.until
        self.error: Exception | None = None
        self._connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
        body = {"model": "tiny", "prompt": "Hello", "stream": True, "max_tokens": max_tokens}
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self._socket = self._connection.sock
        self.response = self._connection.getresponse()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self.response:
                if line.strip():
                    self.events.append(line.decode().strip())
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            self.error = error

    def wait_for_tokens(self, count: int) -> None:
        self._until(lambda: len(self.events) >= count, f"{count} tokens")

    def finish(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.response.close()
        self._connection.close()

    def leave(self) -> None:
        """Go away in the middle of the answer."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self.finish()


def ask(running: Running, key: str | None = None, body: Any = None) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    text = json.dumps({"model": "tiny", "prompt": "Hi", "max_tokens": 2} if body is None else body)
    connection.request("POST", "/v1/completions", text, headers)
    response = connection.getresponse()
    answer = (response.status, json.loads(response.read() or b"{}"))
    connection.close()
    return answer


def test_drain_finishes_the_stream_turns_new_requests_away_and_ends_with_0(start: Start) -> None:
    running = start()
    running.wait_for("ready", 200)
    running.behave(token_s=0.05, tokens=60)
    stream = Stream(running)
    stream.wait_for_tokens(3)
    running.family()

    running.stop()
    reason = running.wait_for("ready", 503)
    status, body = ask(running)
    live = running.probe("live")
    stream.finish()

    assert reason == "DRAINING"
    assert (status, body["error"]["code"]) == (503, "draining")
    assert live[0] == 200
    assert stream.error is None
    assert len(stream.events) == 61
    assert stream.events[-1] == "data: [DONE]"
    assert running.wait() == 0
    running.assert_nothing_left()


def test_drain_that_takes_too_long_ends_with_50_and_leaves_nothing(start: Start) -> None:
    running = start(drain="1s")
    running.wait_for("ready", 200)
    running.behave(token_s=0.1, tokens=10_000)
    stream = Stream(running)
    stream.wait_for_tokens(2)
    running.family()

    running.stop()

    assert running.wait(20) == 50
    assert "error[DRAIN_TIMEOUT]" in running.log.read_text()
    stream.finish()
    assert "data: [DONE]" not in stream.events
    running.assert_nothing_left()


@pytest.mark.parametrize(
    ("drain", "signals", "code"), [("1s", 1, 50), ("10m", 2, 0)], ids=["late", "cut"]
)
def test_engine_that_waits_for_given_up_requests_is_killed_soon(
    start: Start, drain: str, signals: int, code: int
) -> None:
    running = start(drain=drain, behave={"ignore_sigterm": True})
    running.wait_for("ready", 200)
    running.behave(token_s=0.1, tokens=10_000)
    stream = Stream(running)
    stream.wait_for_tokens(2)
    running.family()
    began = time.monotonic()

    for _ in range(signals):
        running.stop()
        running.wait_for("ready", 503)

    assert running.wait(20) == code
    assert time.monotonic() - began < 1.0 + 3.0 + 5.0
    stream.finish()
    running.assert_nothing_left()


def test_second_sigterm_cuts_the_drain_short_and_ends_with_0(start: Start) -> None:
    running = start(drain="10m")
    running.wait_for("ready", 200)
    running.behave(token_s=0.1, tokens=10_000)
    stream = Stream(running)
    stream.wait_for_tokens(2)
    running.stop()
    running.wait_for("ready", 503)

    running.stop()

    assert running.wait(20) == 0
    stream.finish()


def test_engine_deaf_to_sigterm_is_killed_by_a_further_signal(start: Start) -> None:
    running = start(behave={"ignore_sigterm": True})
    running.wait_for("ready", 200)
    running.family()
    running.stop()
    running.until(lambda: running.probe("ready")[1] == "STOPPING", "stopping")

    running.stop()

    assert running.wait(10) == 0
    assert running.named("engine.end")[0]["returncode"] == -signal.SIGKILL
    running.assert_nothing_left()


def test_drain_verb_ends_the_run_with_0(start: Start) -> None:
    running = start()
    running.wait_for("ready", 200)
    port = f"--port={running.admin_port}"
    verb = (sys.executable, "-m", "appliance")

    done = subprocess.run(
        (*verb, "drain", port, "--wait=20"), capture_output=True, text=True, check=False
    )
    status = subprocess.run((*verb, "status", port), capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "draining\nended\n")
    assert running.wait() == 0
    assert status.returncode == 41
    assert status.stderr.startswith("error[NOT_RUNNING] http://127.0.0.1:")


def test_drain_is_not_for_web_pages(start: Start) -> None:
    running = start()
    running.wait_for("ready", 200)
    connection = http.client.HTTPConnection("127.0.0.1", running.admin_port, timeout=10)

    connection.request("POST", "/drain", headers={"Origin": "http://example.org"})

    status = connection.getresponse().status
    connection.close()

    assert status == 403
    assert running.probe("ready") == (200, "READY")


def test_client_that_leaves_gives_its_place_back(start: Start) -> None:
    running = start()
    running.wait_for("ready", 200)
    running.behave(token_s=0.05, tokens=10_000)
    stream = Stream(running)
    stream.wait_for_tokens(2)
    assert running.status()["requests"]["in_flight"] == 1

    stream.leave()

    running.until(lambda: running.status()["requests"]["in_flight"] == 0, "nothing in flight")
    running.behave()
    assert ask(running)[0] == 200
    assert running.probe("ready") == (200, "READY")


def test_keys_are_asked_for_and_the_canary_needs_none(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# team\nsecret-one\n")
    running = start(server=f", api_keys_file: {keys}")
    running.wait_for("ready", 200)

    without, wrong, right = (ask(running, key)[0] for key in (None, "guess", "secret-one"))
    models = running.get("/v1/models", port=running.port)[0]
    health = running.get("/health", port=running.port)[0]

    assert (without, wrong, right, models, health) == (401, 401, 200, 401, 200)
    assert "secret-one" not in running.log.read_text()


def test_missing_key_file_is_refused_with_10_before_the_engine(start: Start) -> None:
    running = start(server=", api_keys_file: /nowhere/keys")

    assert running.wait() == 10
    assert "api_keys_file" in running.log.read_text()
    assert running.named("engine.start") == []


@pytest.mark.parametrize("chunked", [False, True])
def test_request_above_the_size_limit_is_answered_413(start: Start, chunked: bool) -> None:
    running = start(server=", limits: {max_request_size: 4KiB}")
    running.wait_for("ready", 200)
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    body = json.dumps({"model": "tiny", "prompt": "x" * 500_000}).encode()
    parts = iter([body[:1000], body[1000:]]) if chunked else body

    connection.request("POST", "/v1/completions", parts, encode_chunked=chunked, headers={
        "Content-Type": "application/json",
        **({"Transfer-Encoding": "chunked"} if chunked else {}),
    })  # fmt: skip
    response = connection.getresponse()
    answer = (response.status, json.loads(response.read())["error"]["code"])
    connection.close()

    assert answer == (413, "request_too_large")
    assert ask(running)[0] == 200
