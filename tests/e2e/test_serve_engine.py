"""The whole line over vLLM itself: the demo model, real clients, real kills."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from openai import APIStatusError, OpenAI

sys.path.extend(str(Path(__file__).parents[at] / part) for at, part in ((0, ""), (1, "gpu")))

import engine_asks  # found through the line above
import hostile_requests  # likewise

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Running

    Start = Callable[..., Running]

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LOAD_S = 400.0
"""Loading takes half a minute on two free cores; other work on the machine makes it minutes."""


def client_of(running: Running) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="EMPTY", max_retries=0)


def every_kind_of_request(running: Running) -> dict[str, Any]:
    """What is wrong with the answers to each kind; nothing where all is well."""
    asked = engine_asks.every_kind(f"http://127.0.0.1:{running.port}", "tiny", together=2)
    return {kind: found["error"] for kind, found in asked.items() if "error" in found}


def process_named(running: Running, part: str) -> int:
    """Return the pid of the engine's process whose title holds `part`."""
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in running.family()}
    return next(pid for pid, title in titles.items() if part in title)


def test_model_answers_every_request_then_drains_under_load_and_leaves_nothing(
    start_engine: Start,
) -> None:
    running = start_engine()
    running.wait_for("ready", 200, LOAD_S)
    running.family()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    story = [{"role": "user", "content": "Tell me a long story about the sea."}]
    wrong = every_kind_of_request(running)
    wrong |= hostile_requests.wrong(f"http://127.0.0.1:{running.port}", "tiny")
    with client_of(running) as client:
        answer = client.chat.completions.create(
            model="tiny", messages=question, max_tokens=24, temperature=0
        )
        stream = client.chat.completions.create(
            model="tiny", messages=story, max_tokens=96, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        parts = iter(stream)
        first = [next(parts) for _ in range(4)]
        running.stop()
        reason = running.wait_for("ready", 503)
        with pytest.raises(APIStatusError) as turned_away:
            client.chat.completions.create(model="tiny", messages=question, max_tokens=1)
        rest = list(parts)

    assert wrong == {}
    assert "Paris" in (answer.choices[0].message.content or "")
    assert reason == "DRAINING"
    assert turned_away.value.status_code == 503
    assert len(first) + len(rest) >= 96
    assert rest[-1].choices[0].finish_reason == "length"
    assert running.wait(90) == 0
    running.assert_nothing_left()


def test_stopped_core_is_not_ready_then_ends_with_43_and_leaves_nothing(
    start_engine: Start,
) -> None:
    running = start_engine()
    running.wait_for("ready", 200, LOAD_S)
    core = process_named(running, "EngineCore")

    os.kill(core, signal.SIGSTOP)
    stopped = time.monotonic()
    with client_of(running) as client:
        asking = threading.Thread(target=ask_in_vain, args=(client,))
        asking.start()
        reason = running.wait_for("ready", 503)
        not_ready_s = time.monotonic() - stopped
        health = running.get("/health", port=running.port)[0]
        code = running.wait(90)
        asking.join(30)

    assert health == 200, "the engine's own health route sees nothing"
    assert reason == "NO_PROGRESS"
    assert not_ready_s < 30.0
    assert code == 43
    running.assert_nothing_left()


def ask_in_vain(client: OpenAI) -> None:
    with pytest.raises(Exception, match=r"onnection|disconnect|peer closed"):
        client.completions.create(model="tiny", prompt="One, two,", max_tokens=4)


def test_kill_9_of_worker_then_of_supervisor_leaves_nothing(start_engine: Start) -> None:
    running = start_engine(budget=10)
    running.wait_for("ready", 200, LOAD_S)
    worker = process_named(running, "Worker")
    os.kill(worker, signal.SIGKILL)
    code = running.wait(90)
    running.assert_nothing_left()

    again = start_engine(budget=10)
    again.wait_for("ready", 200, LOAD_S)
    again.family()
    ends = again.status()["recent_ends"]
    again.stop(signal.SIGKILL)
    again.wait()

    assert code == 41
    assert "error[ENGINE_DIED]" in running.log.read_text()
    assert ends == 1
    again.assert_nothing_left()
