"""`python -m healthchecks hostcheck`: what must hold on the host before a container is started.

Exit 0 when nothing fails (warnings are lines), 1 when something fails, 2 when something could not
be told.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from healthchecks.children import ChildTimeoutError, LineChild
from healthchecks.host.bus import bus_findings
from healthchecks.host.resources import (
    device_findings,
    disk_findings,
    hung_findings,
    memory_findings,
    persistence_findings,
)
from healthchecks.host.runtime import cdi_findings, driver_findings, toolkit_findings
from healthchecks.nvml import NvmlUnavailable, read_host
from healthchecks.result import Status
from healthchecks.sysfs import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from healthchecks.facts import HostFacts
    from healthchecks.host.finding import Finding

_GIB = 1024**3
DOCKER_TIMEOUT_S = 10.0
NVML_TIMEOUT_S, GPU_TIMEOUT_S = 10.0, 5.0


def main(words: Sequence[str]) -> int:
    """Check the host, print one line a finding or JSON, return the exit code."""
    arguments = _parser().parse_args(words)
    root = arguments.root
    info = docker_info() if root == ROOT else _recorded_info(root)
    findings = tuple(
        findings_of(
            root,
            info,
            _nvml() if root == ROOT else None,
            cdi_devices=arguments.cdi_device,
            ram_bytes=round(arguments.ram_gib * _GIB),
            disk=arguments.disk,
            disk_bytes=round(arguments.disk_gib * _GIB),
        )
    )
    sys.stdout.write(as_json(findings) if arguments.json else as_text(findings))
    return exit_code(findings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m healthchecks hostcheck", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--root", type=Path, default=ROOT, help="root of the host's files")
    parser.add_argument(
        "--cdi-device",
        action="append",
        default=[],
        metavar="NAME",
        help="a CDI device that must resolve",
    )
    parser.add_argument("--ram-gib", type=float, default=8.0, help="host memory to ask for")
    parser.add_argument("--disk", type=Path, default=Path(), help="folder whose free space counts")
    parser.add_argument("--disk-gib", type=float, default=20.0, help="free space to ask for")
    return parser


def findings_of(
    root: Path,
    info: str | None,
    facts: HostFacts | None,
    *,
    cdi_devices: Sequence[str],
    ram_bytes: int,
    disk: Path,
    disk_bytes: int,
) -> Iterator[Finding]:
    """Yield every finding; `info` is what `docker info` printed, `facts` what NVML said."""
    yield from driver_findings(root)
    yield from toolkit_findings(root, info)
    yield from cdi_findings(root, cdi_devices)
    yield from device_findings(root)
    yield from persistence_findings(facts)
    yield from hung_findings(root)
    yield from bus_findings(root)
    yield from memory_findings(root, ram_bytes)
    yield from disk_findings(disk, disk_bytes)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if anything failed, else 2 if anything is unknown, else 0."""
    statuses = {finding.status for finding in findings}
    return 1 if Status.FAIL in statuses else 2 if Status.UNKNOWN in statuses else 0


def as_text(findings: Sequence[Finding]) -> str:
    """Return one line a finding."""
    return "".join(f"{finding.line()}\n" for finding in findings)


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as JSON with the exit code."""
    rows = [
        {
            "code": finding.code,
            "status": finding.status.value,
            "seen": finding.seen,
            "remedy": finding.remedy or None,
        }
        for finding in findings
    ]
    return json.dumps({"exit_code": exit_code(findings), "findings": rows}, indent=1) + "\n"


def docker_info() -> str | None:
    """Return what `docker info` prints as JSON, None without an answer in time."""
    program = shutil.which("docker")
    if program is None:
        return None
    child = LineChild([program, "info", "--format", "{{json .}}"])
    try:
        return child.next_line(DOCKER_TIMEOUT_S)
    except ChildTimeoutError:
        return None
    finally:
        child.stop()


def _recorded_info(root: Path) -> str | None:
    path = root / "docker-info.json"
    return path.read_text() if path.is_file() else None


def _nvml() -> HostFacts | None:
    try:
        return read_host(timeout_s=NVML_TIMEOUT_S, gpu_timeout_s=GPU_TIMEOUT_S)
    except NvmlUnavailable:
        return None
