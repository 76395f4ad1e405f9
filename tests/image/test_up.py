"""`appliance up` and the override that it renders, down to the running container.

The tests build on each other in this order, since each start of the engine costs half a minute.
"""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

KEY = "sk-one-of-two"
SHM = 2 * 1024**3
GRACE_S = 30
MARGIN_S = 30

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def up(service: Any) -> Any:
    """A stack that `appliance up` started: ports, shared memory, drain and keys of its own."""
    keys = service.folder / "keys"
    keys.write_text(f"sk-the-other\n{KEY}\n")
    keys.chmod(0o644)  # Compose mounts it as it is, for uid 10001
    service.environment["APPLIANCE_API_KEYS_FILE"] = str(keys)
    code, said = service.appliance_up(text(service), limit_s=service.load_s)
    assert code == 0, said
    assert f"http://127.0.0.1:{service.port}/v1" in said
    return service


def text(service: Any, **memory: Any) -> str:
    return service.configuration(
        server={
            "port": service.port,
            "admin_port": service.admin_port,
            "drain_timeout": f"{GRACE_S}s",
            "api_keys_file": "/run/secrets/api_keys",
        },
        memory={"shm_size": "2GiB", **memory},
    )


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_up_starts_what_the_configuration_asks_for(up: Any) -> None:
    container = up.container()
    host = container.attrs["HostConfig"]

    assert up.state()["Health"]["Status"] == "healthy"
    assert container.labels["appliance.config-sha256"] == sha256(up.config / "appliance.yaml")
    assert host["ShmSize"] == SHM
    assert {port["HostPort"] for [port] in host["PortBindings"].values()} == {
        str(up.port),
        str(up.admin_port),
    }
    assert container.attrs["Config"]["StopTimeout"] == GRACE_S + MARGIN_S


def test_models_are_mounted_read_only(up: Any) -> None:
    mounts = {mount["Destination"]: mount["RW"] for mount in up.container().attrs["Mounts"]}

    assert mounts["/models"] is False
    assert mounts["/etc/appliance"] is False
    assert mounts["/run/secrets/api_keys"] is False
    assert {place for place, writable in mounts.items() if writable} == {
        "/var/lib/appliance",
        "/var/cache/appliance",
    }


@pytest.mark.parametrize(
    ("header", "status"),
    [({}, 401), ({"Authorization": "Bearer sk-wrong"}, 401), ({"Authorization": KEY}, 401)],
)
def test_api_refuses_without_a_key(up: Any, header: dict[str, str], status: int) -> None:
    answer = httpx.get(f"http://127.0.0.1:{up.port}/v1/models", headers=header, timeout=10)

    assert answer.status_code == status
    assert KEY not in answer.text


@pytest.mark.parametrize("key", [KEY, "sk-the-other"])
def test_api_answers_with_a_key(up: Any, key: str) -> None:
    answer = up.chat("Say yes.", key=key, max_tokens=4)

    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] >= 1


def test_probes_need_no_key(up: Any) -> None:
    assert httpx.get(f"http://127.0.0.1:{up.port}/health", timeout=10).status_code == 200
    assert up.probe("ready") == (200, "READY")


def test_keys_are_in_no_log_and_no_environment(up: Any) -> None:
    container = up.container()
    seen = json.dumps(container.attrs) + container.logs().decode(errors="replace")

    assert KEY not in seen
    assert KEY not in up.container("gate").logs().decode(errors="replace")


def test_edited_configuration_recreates_the_container(up: Any) -> None:
    before = up.container()
    code, said = up.appliance_up(text(up, max_num_seqs=2), "--render-only")
    assert code == 0, said

    up.compose("create", project=True)

    after = up.container()
    assert after.id != before.id
    assert after.labels["appliance.config-sha256"] == sha256(up.config / "appliance.yaml")
    assert after.labels["appliance.config-sha256"] != before.labels["appliance.config-sha256"]


def test_taken_port_ends_up_with_12_and_names_the_port(stack: Any) -> None:
    with socket.create_server(("127.0.0.1", stack.port)):
        code, said = stack.appliance_up(
            stack.configuration(server={"port": stack.port, "admin_port": stack.admin_port})
        )

    assert code == 12, said
    assert "error[PORT_UNAVAILABLE]" in said
    assert str(stack.port) in said


def test_missing_models_directory_ends_up_and_is_not_made(stack: Any, tmp_path: Path) -> None:
    stack.models = tmp_path / "nowhere"

    code, said = stack.appliance_up(stack.configuration())

    assert code == 30, said
    assert said.count("error[") == 1
    assert str(stack.models) in said
    assert not stack.models.exists()
