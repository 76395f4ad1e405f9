"""Docker Compose as `appliance up` uses it: versions, one streamed call, what its errors mean."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

NEEDED_ENGINE = (20, 10, 0)
NEEDED_COMPOSE = (2, 24, 4)
"""The first Compose with `!override`, which rendered lists need."""

_PROBE_S = 30.0
_REASONS = 4
"""Lines of Compose that a fault repeats at most."""


@dataclass(frozen=True)
class Meaning:
    """What one of Compose's messages means here."""

    pattern: str
    exit_code: ExitCode
    code: str
    what: str
    fix: str


MEANINGS = (
    Meaning(
        r"could not select device driver|unresolvable CDI device|nvidia-container-cli",
        ExitCode.NO_GPU,
        "NO_GPU_RUNTIME",
        "the container engine must be able to hand GPUs into a container",
        "install nvidia-container-toolkit, run `nvidia-ctk runtime configure --runtime=docker` and "
        "restart docker (`python -m healthchecks hostcheck` tells which is missing)",
    ),
    Meaning(
        r"port is already allocated|address already in use",
        ExitCode.CONTAINER,
        "PORT_UNAVAILABLE",
        "server.port and server.admin_port must be free on this host",
        "stop the other listener (`ss -ltnp`) or change the port in the configuration",
    ),
    Meaning(
        r"bind source path does not exist",
        ExitCode.CONTAINER,
        "MOUNT_MISSING",
        "every directory that is mounted must exist on this host",
        "create it, or name another by --config or --models",
    ),
    Meaning(
        r"No such image|pull access denied|image .* not found",
        ExitCode.CONTAINER,
        "IMAGE_MISSING",
        "the image must have been built",
        "run `make image` (`make image-cpu` for the CPU engine)",
    ),
    Meaning(
        r"error setting rlimit",
        ExitCode.CONTAINER,
        "RLIMIT_REFUSED",
        "the container engine must be allowed to set the limits of compose.yaml",
        "give dockerd CAP_SYS_RESOURCE or override `ulimits`",
    ),
    Meaning(
        r"Cannot connect to the Docker daemon|permission denied .*docker",
        ExitCode.CONTAINER,
        "DOCKER_UNAVAILABLE",
        "a Docker engine must answer",
        "start it, or join the group that may use its socket",
    ),
)


def verify_versions(environment: Mapping[str, str]) -> None:
    """Ask engine and Compose for their versions.

    Raises:
        ApplianceError: Exit 12, if one does not answer or is too old.
    """
    engine = ("docker", "version", "--format", "{{.Server.Version}}")
    compose = ("docker", "compose", "version", "--short")
    _verify("the Docker engine", engine, NEEDED_ENGINE, environment)
    _verify("Docker Compose", compose, NEEDED_COMPOSE, environment)


def version_of(text: str) -> tuple[int, ...] | None:
    """Return the three numbers of a version such as `2.26.1-4`, None if the text holds none."""
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return None if found is None else tuple(int(part or 0) for part in found.groups())


def run_compose(
    words: Sequence[str], *, folder: Path, environment: Mapping[str, str]
) -> str | None:
    """Run one Compose command, its lines on our stderr; None if it succeeds, else what it said."""
    command = ("docker", "compose", *words)
    lines: list[str] = []
    with subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout or ():
            sys.stderr.write(line)
            lines.append(line)
    return None if process.returncode == 0 else "".join(lines)


def ended_service(said: str) -> tuple[str, int] | None:
    """Return the service whose container ended and its exit code, from what Compose said."""
    gate = re.search(r'service "(\w+)" didn\'t complete successfully: exit (\d+)', said)
    found = gate or re.search(r"container \S+?-(\w+)-\d+ exited \((\d+)\)", said)
    return None if found is None else (found[1], int(found[2]))


def refusal(said: str) -> ApplianceError:
    """Return the error of a Compose command that failed before any container of ours ended."""
    for meaning in MEANINGS:
        if (found := re.search(meaning.pattern, said, re.IGNORECASE)) is not None:
            value = _line_of(said, found.start())
            fault = Fault(meaning.code, "docker compose", meaning.what, value, meaning.fix)
            return ApplianceError(meaning.exit_code, fault)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    value = " | ".join(lines[-_REASONS:]) or "no message"
    what, fix = "must start the services", "see the lines above"
    return ApplianceError(
        ExitCode.CONTAINER, Fault("COMPOSE_FAILED", "docker compose", what, value, fix)
    )


def _line_of(text: str, position: int) -> str:
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return text[start : end if end >= 0 else len(text)].strip().rstrip(".")


def _verify(
    name: str, command: Sequence[str], needed: tuple[int, ...], environment: Mapping[str, str]
) -> None:
    wanted = ".".join(map(str, needed))
    what = f"must answer in version {wanted} or later"
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PROBE_S,
            env=dict(environment),
        )
        answer = (done.stdout or done.stderr).strip()
        found = version_of(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired) as error:
        answer, found = str(error), None
    if found is None or found < needed:
        code = "DOCKER_UNAVAILABLE" if found is None else "DOCKER_TOO_OLD"
        fix = f"install or start {name} {wanted} or later"
        last = answer.splitlines()[-1] if answer else "no answer"
        raise ApplianceError(ExitCode.CONTAINER, Fault(code, name, what, last.rstrip("."), fix))
