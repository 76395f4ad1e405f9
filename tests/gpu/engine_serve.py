"""`appliance serve` on real GPUs, end to end: `engine_serve.py MODEL RESULT [single|pipeline]`.

Plans and serves MODEL (a folder with a tokenizer), waits until it is ready, asks it, alone and
sixteen at a time, and then takes a process of the engine away: the appliance must end with 41. The
gate is off, since it passes no other card than a V100. The first request may be slower than the
second by half a second, greedy ones and sixteen sampled ones alike. Every package must be
importable without PYTHONPATH, which the supervisor keeps from the engine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

API, ADMIN = "http://127.0.0.1:8000", "http://127.0.0.1:9400"
READY_WITHIN_S, ENDS_WITHIN_S = 200.0, 60.0
FIRST_SLOWER_S = 0.5
"""By how much the first request after readiness may be slower than the second: nothing that takes
seconds, such as a kernel's compilation, may be left for a user's request."""
TEXTS = [
    "The capital of France is",
    "Three primary colors are red,",
    "def add(a, b):\n    return",
    "Once upon a time, in a small village by the sea,",
]
COMMAND = "import sys; from appliance.cli import main; sys.exit(main())"
CONFIG = """
version: 1
model: {{path: {model}, served_name: asked, max_model_len: 2048}}
parallel: {{mode: {mode}}}
memory: {{max_num_seqs: 16, max_num_batched_tokens: 2048, gpu_memory_utilization: 0.2}}
gate: {{mode: "off", state_dir: {folder}/state}}
runtime: {{restart_budget: {{count: 0}}}}
startup: {{timeout: 5m}}
logging: {{format: text}}
"""


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    """Ask and decode; an HTTP error is the answer's status."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def ask(text: str, **sampling: float) -> str:
    """One completion of 32 tokens, greedy unless told otherwise."""
    body = {"model": "asked", "prompt": text, "max_tokens": 32, "temperature": 0, **sampling}
    return str(call(f"{API}/v1/completions", body)["choices"][0]["text"])


def ask_sampled(text: str) -> str:
    """One completion with top-k and top-p, which run in kernels of their own."""
    return ask(text, temperature=0.8, top_k=20, top_p=0.9)


def first_and_second() -> dict[str, list[float]]:
    """Seconds of the first and the second request: one greedy, and sixteen sampled at a time."""

    def sixteen() -> None:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(ask_sampled, TEXTS * 4))

    return {
        name: [round(seconds(work), 2) for _ in range(2)]
        for name, work in (("greedy", lambda: ask(TEXTS[0])), ("sixteen sampled", sixteen))
    }


def seconds(work: Callable[[], object]) -> float:
    """How long some work takes."""
    started = time.monotonic()
    work()
    return time.monotonic() - started


def holds(result: dict[str, Any]) -> bool:
    """Whether it served, answered alike, kept nothing for a first request, and ended with 41."""
    times = result.get("first_and_second_s", {}).values()
    early = bool(times) and all(first <= second + FIRST_SLOWER_S for first, second in times)
    return result.get("exit") == 41 and result.get("equal") == 16 and early


def wait_until_ready(child: subprocess.Popen[bytes]) -> float:
    """Seconds until the admin port says ready; raises when the appliance ends or is late."""
    started = time.monotonic()
    while time.monotonic() - started < READY_WITHIN_S:
        if child.poll() is not None:
            raise RuntimeError(f"the appliance ended with {child.returncode}")
        try:
            call(f"{ADMIN}/health/ready")
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
            continue
        return round(time.monotonic() - started, 1)
    raise RuntimeError(f"not ready after {READY_WITHIN_S} s")


def engine_process(name: str) -> int:
    """The process whose title holds `name`, as the engine sets it."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if title.startswith("VLLM::") and name in title:
                return int(entry.name)
    raise RuntimeError(f"no process {name}")


def serve(model: Path, mode: str, folder: Path) -> dict[str, Any]:
    """Serve, ask, take a process away."""
    config = folder / "appliance.yaml"
    config.write_text(CONFIG.format(model=model.resolve(), mode=mode, folder=folder))
    words = [sys.executable, "-c", COMMAND]
    plan = subprocess.run(
        [*words, "render", "--config", str(config)], capture_output=True, text=True, check=False
    )
    result: dict[str, Any] = {"render": (plan.stdout + plan.stderr)[-6000:]}
    child = subprocess.Popen([*words, "serve", "--config", str(config)], start_new_session=True)
    try:
        result["ready_s"] = wait_until_ready(child)
        result["first_and_second_s"] = first_and_second()
        started = time.monotonic()
        alone = [ask(text) for text in TEXTS]
        result["alone_s"] = round(time.monotonic() - started, 2)
        started = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(ask, TEXTS * 4))
        result["together_s"] = round(time.monotonic() - started, 2)
        result["answers"] = dict(zip(TEXTS, alone, strict=True))
        result["equal"] = sum(a == b for a, b in zip(alone * 4, together, strict=True))
        victim = engine_process("EngineCore" if mode == "single" else "Worker_PP1")
        started = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        result["exit"] = child.wait(ENDS_WITHIN_S)
        result["ended_s"] = round(time.monotonic() - started, 1)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
    return result


def main() -> int:
    """Write the result; 0 when all of it holds."""
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    mode = sys.argv[3] if len(sys.argv) > 3 else "single"
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = serve(model, mode, Path(folder))
        except Exception as error:  # noqa: BLE001 - the reason is the result
            result = {"error": f"{type(error).__name__}: {error}"}
    out.write_text(json.dumps(result, indent=1))
    return 0 if holds(result) else 1


if __name__ == "__main__":
    sys.exit(main())
