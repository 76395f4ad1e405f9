"""A stand-in for vLLM's API server: same command line, same routes, no model.

It is started like the real one (`python -m vllm.entrypoints.openai.api_server FLAGS`), builds
its middleware from `--middleware`, and starts a core and a worker process below it. What it does is
read from the JSON file that FAKE_ENGINE names, again at every request:

    record          file that gets its command line and environment
    load_s          seconds before it listens
    log             lines written while it loads
    exit            exit status at the end of loading, in place of serving
    unless          flag that makes `log` and `exit` not happen
    ignore_sigterm  SIGTERM does nothing
    mode            normal, hang, error, bang (one token for ever), nan, null
    model           name in /v1/models in place of --served-model-name
    chat_status     status of every chat in place of an answer
    tokens          tokens of one answer
    token_s         seconds a token takes
    metrics_s       seconds /metrics takes
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn

WORDS = ("The", " sea", " was", " calm", ",", " and", " the", " boat", " came", " home", ".")


def behaviour(name: str, default: Any) -> Any:
    """Return one switch as the file has it now."""
    return json.loads(Path(os.environ["FAKE_ENGINE"]).read_text()).get(name, default)


def flag(name: str, default: str = "") -> str:
    """Return the value of `--name=value` on the command line."""
    values = [word.split("=", 1)[1] for word in sys.argv if word.startswith(f"--{name}=")]
    return values[-1] if values else default


class Engine:
    """The routes and the counters."""

    def __init__(self) -> None:
        self.name = flag("served-model-name")
        self.running = 0
        self.prompt_tokens = 0
        self.generated = 0
        self.steps = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        body = json.loads(await read_body(receive) or b"{}")
        match scope["path"]:
            case "/health":
                await reply(send, 200, b"")
            case "/v1/models":
                models = [{"id": behaviour("model", self.name), "object": "model"}]
                await reply(send, 200, {"object": "list", "data": models})
            case "/tokenize":
                await reply(send, 200, {"tokens": list(range(1, 1 + len(body["prompt"].split())))})
            case "/metrics":
                await asyncio.sleep(behaviour("metrics_s", 0.0))
                await reply(send, 200, self.metrics(), b"text/plain")
            case "/v1/chat/completions" if behaviour("chat_status", 0):
                what = "default chat template is no longer allowed"
                await reply(send, behaviour("chat_status", 0), {"error": {"message": what}})
            case "/v1/completions" | "/v1/chat/completions":
                await until_left(self.generate(scope["path"], body, send), receive)
            case path:
                await reply(send, 404, {"error": {"message": path}})

    def metrics(self) -> bytes:
        labels = f'{{engine="0",model_name="{self.name}"}}'
        values = {
            "vllm:num_requests_running": self.running,
            "vllm:num_requests_waiting": 0,
            "vllm:prompt_tokens_total": self.prompt_tokens,
            "vllm:generation_tokens_total": self.generated,
            "vllm:iteration_tokens_total_count": self.steps,
        }
        return "".join(f"{name}{labels} {value:.1f}\n" for name, value in values.items()).encode()

    async def generate(self, path: str, body: dict[str, Any], send: Any) -> None:
        mode = behaviour("mode", "normal")
        if mode == "error":
            await reply(send, 500, {"error": {"message": "EngineCore encountered an issue."}})
            return
        if mode == "hang":
            await asyncio.Event().wait()
        self.running += 1
        try:
            await self.answer(path, body, mode, send)
        finally:
            self.running -= 1

    async def answer(self, path: str, body: dict[str, Any], mode: str, send: Any) -> None:
        prompt = body.get("prompt", body.get("messages", ""))
        length = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
        self.prompt_tokens += length
        count = min(behaviour("tokens", 24), body.get("max_tokens") or 10**6)
        stream = bool(body.get("stream"))
        if stream:
            await start(send, 200, b"text/event-stream")
        tokens = []
        for index in range(count):
            await asyncio.sleep(behaviour("token_s", 0.0))
            while behaviour("mode", "normal") == "hang":
                await asyncio.sleep(0.02)
            token = "!" if mode == "bang" else WORDS[index % len(WORDS)]
            tokens.append(token)
            self.generated += 1
            self.steps += 1
            if stream:
                event = {"choices": [{"text": token, "index": 0}]}
                data = f"data: {json.dumps(event)}\n\n".encode()
                await send({"type": "http.response.body", "body": data, "more_body": True})
        if stream:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
            return
        value = {"nan": float("nan"), "null": None}.get(mode, -0.5)
        logprobs = {"tokens": tokens, "token_logprobs": [value] * len(tokens)}
        text = "".join(tokens)
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": logprobs}
        if path.endswith("chat/completions"):
            choice = {"index": 0, "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": length, "completion_tokens": len(tokens)}
        await reply(send, 200, {"choices": [choice], "usage": usage, "model": self.name})


async def read_body(receive: Any) -> bytes:
    chunks = []
    while True:
        message = await receive()
        chunks.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(chunks)


async def until_left(work: Any, receive: Any) -> None:
    """Do the work, but drop it when its client leaves, as vLLM does."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())
    done, _ = await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if task not in done:
        task.cancel()
    await asyncio.gather(task, gone, return_exceptions=True)


async def lifespan(receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})


async def start(send: Any, status: int, kind: bytes) -> None:
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def reply(send: Any, status: int, body: Any, kind: bytes = b"application/json") -> None:
    await start(send, status, kind)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    await send({"type": "http.response.body", "body": data})


def with_middleware(app: Any) -> Any:
    """Wrap the app as vLLM does for `--middleware module.Class`."""
    name = flag("middleware")
    if not name:
        return app
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)(app)


def start_core() -> subprocess.Popen[bytes]:
    """Start a core with a worker below it, which outlive this process unless somebody ends them."""
    worker = "import time; time.sleep(600)"
    core = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    return subprocess.Popen([sys.executable, "-c", core])


def load() -> None:
    """Be as slow, talkative and mortal as the switches say."""
    record = behaviour("record", None)
    if record is not None:
        Path(record).write_text(json.dumps({"argv": sys.argv[1:], "environ": dict(os.environ)}))
    spared = behaviour("unless", "")
    afflicted = not spared or spared not in sys.argv
    if afflicted:
        for line in behaviour("log", []):
            sys.stderr.write(line + "\n")
    sys.stderr.flush()
    time.sleep(behaviour("load_s", 0.0))
    status = behaviour("exit", None)
    if status is not None and afflicted:
        sys.exit(status)


class Server(uvicorn.Server):
    """Ends like vLLM: at once, and with status 0 even when the core has died."""

    async def watch(self, core: subprocess.Popen[bytes]) -> None:
        while core.poll() is None and not self.should_exit:
            await asyncio.sleep(0.05)
        self.should_exit = True


async def serve(core: subprocess.Popen[bytes]) -> None:
    config = uvicorn.Config(
        with_middleware(Engine()),
        host=flag("host"),
        port=int(flag("port")),
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    server = Server(config)
    await asyncio.gather(server.serve(), server.watch(core))


def main() -> None:
    core = start_core()
    load()
    if behaviour("ignore_sigterm", False):
        uvicorn.Server.install_signal_handlers = lambda _self: None  # type: ignore[attr-defined]
        uvicorn.Server.capture_signals = _no_signals  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asyncio.run(serve(core))
    core.kill()


class _no_signals:  # noqa: N801 - stands in for a method that is a context manager
    def __init__(self, _server: object = None) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    main()
