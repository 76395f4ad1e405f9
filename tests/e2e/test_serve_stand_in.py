"""The whole line over the stand-in engine: start, readiness, refusals and safer settings."""

from __future__ import annotations

import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Start

GRAPH_OOM = (
    "(EngineCore pid=7) INFO Capturing CUDA graphs (decode, FULL):  20%",
    "(EngineCore pid=7) ERROR [core.py:866] torch.OutOfMemoryError: CUDA out of memory.",
)


def children_cpu_s() -> float:
    """Seconds of processor time of ended children: what they take when nothing else runs here."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_serve_becomes_ready_and_ends_with_0_on_sigterm(start: Start) -> None:
    running = start()
    running.wait_for("ready", 200)
    running.family()

    running.stop()

    assert running.wait() == 0
    running.assert_nothing_left()


def test_serve_slow_load_never_fails_live_and_startup_is_ok_meanwhile(start: Start) -> None:
    running = start(stall="1s", behave={"load_s": 3.0})
    running.wait_for("startup", 200)
    seen: set[tuple[int, str]] = set()

    while (ready := running.probe("ready")[0]) != 200:
        assert ready == 503
        seen.add(running.probe("live"))

    assert {status for status, _ in seen} == {200}
    assert (200, "LOADING") in seen
    assert running.status()["engine"]["attempt"] == 1


def test_serve_sigterm_while_loading_ends_with_0_and_leaves_nothing(start: Start) -> None:
    running = start(behave={"load_s": 600.0})
    running.engine_pid()
    running.family()

    running.stop(signal.SIGINT)

    assert running.wait(10) == 0
    running.assert_nothing_left()


def test_serve_sigterm_before_anything_is_planned_ends_with_0(start: Start) -> None:
    running = start()
    running.until(running.takes_signals, "signals taken")

    running.stop()

    assert running.wait() == 0
    assert running.named("serve.ready") == []


@pytest.mark.parametrize("taken", ["port", "admin_port"])
def test_serve_taken_port_is_refused_with_12_before_anything_is_loaded(
    start: Start, taken: str
) -> None:
    with socket.socket() as holder, socket.socket() as other:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]
        other.close()
        held = holder.getsockname()[1]
        running = start(ports=(held, free) if taken == "port" else (free, held))

        code = running.wait()

    assert code == 12
    assert f"error[PORT_UNAVAILABLE] server.{taken} 127.0.0.1:{held}" in running.log.read_text()
    assert running.named("engine.start") == []


def test_serve_second_appliance_on_one_state_directory_is_refused_with_12(start: Start) -> None:
    first = start()
    first.wait_for("ready", 200)

    second = start()

    assert second.wait() == 12
    assert "error[STATE_DIR_IN_USE]" in second.log.read_text()
    assert first.probe("ready") == (200, "READY")


def test_serve_engine_that_does_not_start_is_named_and_ends_with_40(start: Start) -> None:
    line = "api_server.py: error: unrecognized arguments: --swap-space=4"
    running = start(behave={"log": [line], "exit": 2})

    assert running.wait() == 40
    assert "error[ENGINE_ARGUMENT] engine:" in running.log.read_text()
    assert len(running.named("engine.start")) == 1


def test_serve_graph_memory_fault_is_cured_by_an_eager_start(start: Start) -> None:
    behave = {"log": list(GRAPH_OOM), "exit": 1, "unless": "--enforce-eager"}
    running = start(eager="false", behave=behave)

    running.wait_for("ready", 200)

    status = running.status()
    assert status["safer_settings"] == ["execution.enforce_eager=true"]
    assert status["engine"]["attempt"] == 2
    assert running.named("serve.safer_settings")[0]["cause"] == "GRAPH_OOM"


def test_serve_ladder_off_does_not_try_again(start: Start) -> None:
    behave = {"log": list(GRAPH_OOM), "exit": 1, "unless": "--enforce-eager"}
    running = start(eager="false", ladder="false", behave=behave)

    assert running.wait() == 40
    assert "error[GRAPH_OOM]" in running.log.read_text()


@pytest.mark.parametrize(
    ("behave", "code"),
    [
        ({"mode": "bang"}, "DEGENERATE_OUTPUT"),
        ({"mode": "nan"}, "NUMERIC_NAN"),
        ({"mode": "null"}, "NUMERIC_NAN"),
        ({"mode": "error"}, "CANARY_FAILED"),
        ({"model": "Qwen3-0.6B"}, "WRONG_MODEL"),
    ],
)
def test_rc_012_rc_033_rc_035_rc_053_canary_refuses_an_engine_that_answers_wrongly(
    start: Start, behave: dict[str, str], code: str
) -> None:
    running = start(behave=behave)

    assert running.wait() == 40
    assert f"error[{code}]" in running.log.read_text()
    assert running.named("serve.ready") == []


def test_serve_engine_that_never_answers_is_given_up_at_the_start_deadline(start: Start) -> None:
    running = start(timeout="10s", behave={"mode": "hang"})
    running.wait_for("startup", 200)
    running.family()

    assert running.wait(40) == 40
    assert "error[CANARY_TIMEOUT]" in running.log.read_text()
    running.assert_nothing_left()


def test_serve_absent_model_ends_with_30_at_once_and_is_held_back_the_next_time(
    start: Start,
) -> None:
    first = start(model="/models/nowhere")
    assert first.wait() == 30
    said = first.log.read_text()

    second = start(model="/models/nowhere")
    second.until(second.takes_signals, "signals taken")
    with pytest.raises(subprocess.TimeoutExpired):
        second.process.wait(3.0)
    second.stop()

    assert said.startswith("error[")
    assert said.count("\n") == 1
    assert second.wait(10) == 0
    assert second.log.read_text() == ""


def test_serve_without_canary_is_ready_on_the_engines_own_word(start: Start) -> None:
    running = start(canary="false", behave={"mode": "error"})

    running.wait_for("ready", 200)

    assert running.status()["canary"] is None


def test_serve_admin_port_tells_plan_status_and_both_metrics(start: Start) -> None:
    running = start()
    running.wait_for("ready", 200)
    deadline = time.monotonic() + 20
    while b"vllm:generation_tokens_total" not in running.get("/metrics")[1]:
        assert time.monotonic() < deadline, "the engine's metrics are not passed through"

    text = running.get("/metrics")[1].decode()

    assert "appliance_ready 1.0" in text
    assert 'appliance_phase{phase="ready"} 1.0' in text
    assert b'"served_name": "tiny"' in running.get("/plan")[1]
    assert running.status()["canary"]["long_prompt_tokens"] == 128 + 16 + 1
    assert running.get("/nothing")[0] == 404


def test_probe_scripts_and_verb_agree_and_answer_in_150_ms(start: Start, repository: Path) -> None:
    running = start()
    running.wait_for("ready", 200)
    port = f"--port={running.admin_port}"
    commands = [
        (sys.executable, "-I", "-S", repository / f"healthchecks/probes/{kind}.py", port)
        for kind in ("startup", "live", "ready")
    ]
    commands.append((sys.executable, "-m", "appliance", "probe", "ready", port))
    commands.append(
        (sys.executable, "-m", "appliance", "probe", "live", "--state-dir", running.state)
    )

    for command in commands:
        quickest = 1e9
        for _ in range(5):
            began = children_cpu_s()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            quickest = min(quickest, children_cpu_s() - began)
            assert (done.returncode, done.stdout) == (0, "READY\n"), done.stderr

        assert quickest < 0.150, command


def test_probe_fails_with_one_line_when_nobody_answers(start: Start, repository: Path) -> None:
    running = start(behave={"load_s": 600.0})
    running.wait_for("startup", 200)
    script = repository / "healthchecks/probes/ready.py"
    port = f"--port={running.admin_port}"

    loading = subprocess.run(
        (sys.executable, "-I", "-S", script, port), capture_output=True, text=True, check=False
    )
    running.stop()
    running.wait()
    gone = subprocess.run(
        (sys.executable, "-I", "-S", script, port), capture_output=True, text=True, check=False
    )

    assert (loading.returncode, loading.stdout) == (1, "LOADING\n")
    assert gone.returncode == 1
    assert gone.stdout == f"UNREACHABLE 127.0.0.1:{running.admin_port}: Connection refused\n"


@pytest.mark.parametrize(("broken", "code"), [(None, 0), ("model.safetensors", 31), ("", 30)])
def test_serve_compares_the_files_with_their_manifest_before_the_engine_starts(
    start: Start, tmp_path: Path, tiny_checkpoint: Path, broken: str | None, code: int
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, model)
    names = sorted(path.name for path in model.iterdir())
    if broken != "":
        with (model / "SHA256SUMS").open("w") as file:
            subprocess.run(("sha256sum", "--", *names), cwd=model, stdout=file, check=True)
    if broken:
        with (model / broken).open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\1")

    running = start(model=model, integrity="sha256")

    if code == 0:
        running.wait_for("ready", 200)
        assert [event["gib"] for event in running.named("checkpoint.verified")] == [0.0]
        running.stop()
    assert running.wait() == code
    if code:
        assert running.named("engine.start") == []
        assert f"error[{'E_DIGEST' if code == 31 else 'E_MANIFEST'}] " in running.log.read_text()
