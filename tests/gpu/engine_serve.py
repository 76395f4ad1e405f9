"""`appliance serve` on real GPUs, end to end: `engine_serve.py MODEL RESULT
[single|pipeline] [--random]`.

Plans and serves MODEL (a folder with a tokenizer), waits until it is ready, asks every kind of
request twice, then four texts alone and sixteen at a time, and then takes a process of the engine
away: the appliance must end with 41. The gate is off, since it passes no other card than a V100.
No kernel may be compiled after readiness, and no kind's first requests may be slower than its
second by half a second. Every package must be importable without PYTHONPATH, which the supervisor
keeps from the engine. --random: MODEL's weights are random, whose answers rounding may change.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import engine_asks  # beside this script

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
COMPILED = re.compile(r"JIT compilation during inference: (\w+)")
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


def holds(result: dict[str, Any]) -> bool:
    """Whether it served, answered alike, kept nothing for a first request, and ended with 41."""
    asked = result.get("asked", {})
    answered = set(asked) == set(engine_asks.KINDS) and not any(
        "error" in a for a in asked.values()
    )
    early = answered and all(
        times["first_s"] <= times["second_s"] + FIRST_SLOWER_S for times in asked.values()
    )
    alike = result.get("equal") == 16 or result.get("random", False)
    compiled = result.get("compiled_while_serving")
    return result.get("exit") == 41 and alike and early and compiled == []


def compiled_while_serving(log: str) -> list[str]:
    """Kernels of which the engine says that it compiled them after its warm-up.

    Some are compiled by the requests of the canary, before readiness: those do not count.
    """
    _, _, served = log.partition("serve.ready ")
    return sorted(set(COMPILED.findall(served)))


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
    log = folder / "serve.log"
    with log.open("wb") as sink:
        serve = [*words, "serve", "--config", str(config)]
        child = subprocess.Popen(serve, start_new_session=True, stdout=sink, stderr=sink)
    try:
        result["ready_s"] = wait_until_ready(child)
        result["asked"] = engine_asks.every_kind(API, "asked")
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
        result["compiled_while_serving"] = compiled_while_serving(log.read_text(errors="replace"))
    finally:
        sys.stdout.write(log.read_text(errors="replace"))
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
    return result


def machine() -> dict[str, Any]:
    """What it ran on, and with which library; after the engine is gone."""
    import torch  # noqa: PLC0415 - takes seconds, and only the record needs it

    import appliance  # noqa: PLC0415 - the one that serves, wherever it lies

    library = Path(appliance.__file__).parent / "lib/libnvfp4_sm70.so"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "gpus": [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        library.name: hashlib.sha256(library.read_bytes()).hexdigest(),
    }


def main() -> int:
    """Write the result; 0 when all of it holds."""
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    words = [word for word in sys.argv[3:] if word != "--random"]
    mode = words[0] if words else "single"
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = serve(model, mode, Path(folder)) | {"random": "--random" in sys.argv}
        except Exception as error:  # noqa: BLE001 - the reason is the result
            result = {"error": f"{type(error).__name__}: {error}"}
    record = {"command": " ".join(["python3", *sys.argv]), "machine": machine(), **result}
    out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if holds(result) else 1


if __name__ == "__main__":
    sys.exit(main())
