"""What `appliance doctor` says after runs of the real line over the stand-in engine."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conftest import Running, Start


def doctor(running: Running) -> dict[str, Any]:
    verb = (sys.executable, "-m", "appliance", "doctor", "--json")
    words = (*verb, "--state-dir", running.state)
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def ask_in_vain(running: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    body = json.dumps({"model": "tiny", "prompt": "Hello"})
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connection.getresponse().read()
    connection.close()


def test_drain_that_timed_out_is_no_end_of_the_engine(start: Start) -> None:
    running = start(drain="1s")
    running.wait_for("ready", 200)
    running.behave(mode="hang")
    caller = threading.Thread(target=ask_in_vain, args=(running,))
    caller.start()
    running.until(lambda: running.status()["requests"]["in_flight"] == 1, "a request")

    running.stop()

    assert running.wait(40) == 50
    caller.join(10)
    found = doctor(running)
    assert (found["code"], found["evidence"]) == ("DRAIN_TIMEOUT", ["1 in flight"])


def test_engine_killed_for_a_stall_is_not_said_to_have_ended_by_itself(start: Start) -> None:
    running = start(stall="2s")
    running.wait_for("ready", 200)
    os.kill(running.engine_pid(), signal.SIGSTOP)

    assert running.wait(30) == 43
    found = doctor(running)
    assert found["code"] == "ENGINE_STALLED"
    assert "runtime.stall" in found["what"]


def test_killed_supervisor_is_named(start: Start) -> None:
    running = start()
    running.wait_for("ready", 200)
    running.family()
    running.stop(signal.SIGKILL)
    running.wait()
    running.assert_nothing_left()

    assert doctor(running)["code"] == "UNCLEAN_STOP"
