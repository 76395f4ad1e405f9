"""`appliance up` without a container engine: what it starts, and what Compose's words mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.commands._compose import (
    NEEDED_COMPOSE,
    ended_service,
    refusal,
    run_compose,
    verify_versions,
    version_of,
)
from appliance.commands.up import host_model
from appliance.errors import ApplianceError

Verb = Callable[..., tuple[int, str, str]]

CONFIG = "version: 1\nmodel: {path: /models/m}\nexecution: {device: cpu}\n"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.26.1-4", (2, 26, 1)),
        ("v2.40.0", (2, 40, 0)),
        ("20.10.24+dfsg1", (20, 10, 24)),
        ("28.2", (28, 2, 0)),
        ("no version", None),
    ],
)
def test_version_is_its_three_numbers(text: str, version: tuple[int, ...] | None) -> None:
    assert version_of(text) == version


@pytest.mark.parametrize(
    ("said", "code", "exit_code"),
    [
        (
            'could not select device driver "nvidia" with capabilities: [[gpu]]',
            "NO_GPU_RUNTIME",
            11,
        ),
        ("Bind for 127.0.0.1:8000 failed: port is already allocated", "PORT_UNAVAILABLE", 12),
        ("listen tcp4 127.0.0.1:8000: bind: address already in use", "PORT_UNAVAILABLE", 12),
        ("invalid mount config: bind source path does not exist: /models", "MOUNT_MISSING", 12),
        ("Error response from daemon: No such image: nvfp4-appliance:gpu", "IMAGE_MISSING", 12),
        ("error setting rlimit type 8: operation not permitted", "RLIMIT_REFUSED", 12),
        ("Cannot connect to the Docker daemon at unix:///x", "DOCKER_UNAVAILABLE", 12),
        ("something nobody knows", "COMPOSE_FAILED", 12),
    ],
)
def test_refusal_of_compose_names_cause_and_exit_code(said: str, code: str, exit_code: int) -> None:
    error = refusal(f" Container x  Creating\n{said}.\n")

    assert error.exit_code == exit_code
    assert error.faults[0].code == code
    assert said in error.faults[0].value
    assert error.faults[0].fix


def test_ended_service_is_the_gate_and_its_code() -> None:
    said = 'service "gate" didn\'t complete successfully: exit 20\n'

    assert ended_service(said) == ("gate", 20)


def test_ended_service_is_the_engine_and_its_code() -> None:
    assert ended_service("container nvfp4-appliance-engine-1 exited (41)") == ("engine", 41)


def test_ended_service_is_none_where_nothing_ran() -> None:
    assert ended_service("port is already allocated") is None


def test_host_model_is_below_the_mounted_directory() -> None:
    assert host_model("/models/a/b", Path("/srv/m")) == Path("/srv/m/a/b")


def test_host_model_elsewhere_is_refused() -> None:
    with pytest.raises(ApplianceError, match=r"error\[MODEL_NOT_MOUNTED\].*got /data/m") as caught:
        host_model("/data/m", Path("/srv/m"))

    assert caught.value.exit_code == 10


def test_compose_lines_are_kept_and_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tool = _docker(tmp_path, "echo one; echo two >&2; exit 3")

    said = run_compose(("up",), folder=tmp_path, environment=tool)

    assert said == "one\ntwo\n"
    assert capfd.readouterr().err == "one\ntwo\n"


def test_compose_that_succeeds_says_nothing_to_judge(tmp_path: Path) -> None:
    tool = _docker(tmp_path, "echo done")

    assert run_compose(("up",), folder=tmp_path, environment=tool) is None


def test_old_compose_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    tool = _docker(tmp_path, 'case "$1" in compose) echo 2.20.3;; *) echo 24.0.7;; esac')

    with pytest.raises(ApplianceError) as caught:
        verify_versions(tool)

    assert "error[DOCKER_TOO_OLD] Docker Compose" in str(caught.value)
    assert ".".join(map(str, NEEDED_COMPOSE)) in str(caught.value)


def test_engine_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    tool = _docker(tmp_path, "echo 'Cannot connect to the Docker daemon' >&2; exit 1")

    with pytest.raises(ApplianceError, match=r"error\[DOCKER_UNAVAILABLE\].*Cannot connect"):
        verify_versions(tool)


def _docker(folder: Path, script: str) -> dict[str, str]:
    """Return an environment whose `docker` runs a shell script."""
    path = folder / "docker"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}
