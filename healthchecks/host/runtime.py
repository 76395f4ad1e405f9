"""Driver, toolkit and container engine: three different reasons why a container gets no GPU."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from healthchecks.host.finding import Finding, passed
from healthchecks.result import Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_LIBRARY_FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib", "usr/lib/aarch64-linux-gnu")
_TOOLKIT = ("usr/bin/nvidia-ctk", "usr/bin/nvidia-container-runtime", "usr/local/bin/nvidia-ctk")
_CDI_FOLDERS = ("etc/cdi", "var/run/cdi", "run/cdi")
_REGISTER = "nvidia-ctk runtime configure --runtime=docker && systemctl restart docker"
_GENERATE = "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"


@dataclass(frozen=True)
class CdiSpec:
    """One CDI file: the devices it names, and the library versions it would mount."""

    path: str
    devices: tuple[str, ...]
    versions: frozenset[str]


def module_version(root: Path) -> str | None:
    """Return the version of the loaded kernel module."""
    text = _read(root / "proc/driver/nvidia/version")
    found = re.search(r"(?:Kernel Module(?: for \S+)?)\s+(\d+\.\d+[\d.]*)", text)
    return None if found is None else found[1]


def library_version(root: Path) -> str | None:
    """Return the version of the driver's user-space library on disk."""
    for folder in _LIBRARY_FOLDERS:
        names = sorted(path.name for path in (root / folder).glob("libnvidia-ml.so.*.*"))
        if names:
            return names[-1].removeprefix("libnvidia-ml.so.")
    return None


def driver_findings(root: Path) -> Iterator[Finding]:
    """Judge whether the driver is loaded and of one piece with its library."""
    module, library = module_version(root), library_version(root)
    if module is None:
        seen = "the NVIDIA kernel module is not loaded"
        yield Finding(
            "DRIVER_ABSENT", Status.FAIL, seen, "install driver 535 or 580, then modprobe nvidia"
        )
        return
    if library is not None and library != module:
        yield Finding(
            "DRIVER_MISMATCH",
            Status.FAIL,
            f"module {module}, library {library}",
            "reboot in a maintenance window; do not stop a running container before it",
        )
    else:
        yield passed("DRIVER", f"module {module}")


def toolkit_findings(root: Path, docker_info: str | None) -> Iterator[Finding]:
    """Judge whether the container engine can give a GPU to a container."""
    specs = cdi_specs(root)
    if docker_info is None:
        yield Finding(
            "DOCKER_ABSENT", Status.UNKNOWN, "docker info gave no answer", "start the Docker daemon"
        )
        return
    info = _info(docker_info)
    registered = "nvidia" in (cast("Mapping[str, Any]", info.get("Runtimes") or {}))
    installed = any((root / name).exists() for name in _TOOLKIT)
    configured = "nvidia" in _read(root / "etc/docker/daemon.json")
    if registered or specs:
        how = "runtime nvidia" if registered else f"CDI {specs[0].path}"
        yield passed("GPU_RUNTIME", how)
    elif not installed:
        seen = "the NVIDIA container toolkit is not installed"
        yield Finding(
            "TOOLKIT_ABSENT",
            Status.FAIL,
            seen,
            f"apt-get install nvidia-container-toolkit && {_REGISTER}",
        )
    elif configured:
        seen = "the runtime is in daemon.json and the daemon does not know it"
        yield Finding("DAEMON_NOT_RELOADED", Status.FAIL, seen, "systemctl restart docker")
    else:
        seen = "no runtime nvidia and no CDI specification"
        yield Finding("NO_GPU_RUNTIME", Status.FAIL, seen, _REGISTER)
    if registered and not specs and info.get("CgroupDriver") == "systemd":
        yield Finding(
            "CGROUP_LOSS",
            Status.WARN,
            "systemd cgroups with the legacy runtime: a daemon-reload takes the GPUs from "
            "running containers",
            f"use CDI ({_GENERATE}) or list the device nodes",
        )


def _info(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def cdi_specs(root: Path) -> list[CdiSpec]:
    """Return the CDI specifications for NVIDIA GPUs."""
    paths = sorted(path for folder in _CDI_FOLDERS for path in (root / folder).glob("*.*"))
    found = [_spec(path, root) for path in paths if path.suffix in (".yaml", ".yml", ".json")]
    return [spec for spec in found if spec is not None]


def _spec(path: Path, root: Path) -> CdiSpec | None:
    """Read names and library versions by pattern, which YAML and JSON spell alike enough."""
    text = _read(path)
    if "nvidia.com/gpu" not in text:
        return None
    devices = text.partition("devices")[2]
    names = re.findall(
        r"^\s*(?:-\s+)?\"?name\"?:\s*[\"']?([\w-]+)[\"']?,?\s*$", devices, re.MULTILINE
    )
    versions = re.findall(r"\.so\.(\d+\.\d+(?:\.\d+)?)\b", text)
    return CdiSpec(f"/{path.relative_to(root)}", tuple(names), frozenset(versions))


def cdi_findings(root: Path, wanted: Sequence[str]) -> Iterator[Finding]:
    """Judge whether the names asked for resolve, and whether the specification fits the driver."""
    specs, module = cdi_specs(root), module_version(root)
    if not specs:
        return
    for spec in specs:
        stale = sorted(
            version for version in spec.versions if _driver_like(version) and version != module
        )
        if module is not None and stale:
            seen = f"spec={spec.path} names {stale[0]}, module={module}"
            yield Finding("CDI_STALE", Status.FAIL, seen, _GENERATE)
    known = {name for spec in specs for name in spec.devices}
    missing = [name for name in wanted if name not in known]
    if missing:
        seen = (
            f"name={','.join(missing)} is in no specification (known: {', '.join(sorted(known))})"
        )
        yield Finding("CDI_MISSING", Status.FAIL, seen, _GENERATE)
    else:
        yield passed("CDI", f"{len(known)} devices")


def _driver_like(version: str) -> bool:
    """Driver versions have three digits first; libraries of other makers have not."""
    return len(version.partition(".")[0]) == 3  # noqa: PLR2004


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
