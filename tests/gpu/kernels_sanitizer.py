"""The small checks under compute-sanitizer, beside whatever else the machine does meanwhile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels_report import Report

TOOLS = ("memcheck", "racecheck")
# Small sizes of what reaches every kernel.
WATCHED = ("cases", "same_bits", "exact_grouped", "groups", "moe", "small_ops", "matrix")
FAULT_CODE = 86
SUMMARY = re.compile(r"(ERROR SUMMARY: \d+ error|RACECHECK SUMMARY: \d+ hazard)")
USUAL_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")


def find_sanitizer() -> str | None:
    """compute-sanitizer on the PATH or where CUDA puts it."""
    found = shutil.which("compute-sanitizer")
    for folder in USUAL_PLACES:
        found = found or shutil.which("compute-sanitizer", path=folder)
    return found


@dataclass
class Watch:
    """One tool at work."""

    tool: str
    process: subprocess.Popen[bytes]
    log: Path
    begin: float


def start(script: Path, library: Path, folder: Path) -> list[Watch]:
    """Start every tool on the watched sections; its log goes to a file."""
    program = find_sanitizer()
    if program is None:
        return []
    # One allocation a tensor, so that a step past an edge leaves the allocation.
    environment = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    watches = []
    for tool in TOOLS:
        log = folder / f"sanitizer_{tool}.log"
        command = (
            *(program, "--tool", tool, "--error-exitcode", str(FAULT_CODE)),
            # torch asks the driver questions that it may refuse; memory and races are the subject.
            *(("--report-api-errors", "no") if tool == "memcheck" else ()),
            *(
                sys.executable,
                str(script),
                "--quick",
                "--child",
                *WATCHED,
                "--library",
                str(library),
            ),
        )
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=environment
            )
        watches.append(Watch(tool, process, log, time.monotonic()))
    return watches


def finish(watches: list[Watch], report: Report) -> None:
    """Wait until the report's deadline, then judge what the tools said."""
    if not watches:
        report.fail("no compute-sanitizer on this machine")
    for watch in watches:
        with report.case(watch.tool):
            report.details[watch.tool] = _judge(watch, report.deadline)


def _judge(watch: Watch, deadline: float) -> dict[str, Any]:
    try:
        code = watch.process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        watch.process.kill()
        watch.process.wait()
        raise AssertionError(f"{watch.tool} was not done in time") from None
    text = watch.log.read_text(errors="replace")
    summary = SUMMARY.search(text)
    assert summary, f"{watch.tool} gave no summary, exit code {code}: {text[-600:]}"
    assert " 0 " in f" {summary[0]} ", f"{summary[0]}s: {_first_fault(text)}"
    passed = [name for name in WATCHED if f'{{"section": "{name}", "ok": true' in text]
    failed = sorted(set(WATCHED) - set(passed))
    assert not failed, f"checks failed under {watch.tool}: {failed}"
    assert code == 0, f"exit code {code}"
    return {"summary": f"{summary[0]}s", "seconds": round(time.monotonic() - watch.begin, 1)}


def _first_fault(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("=========")]
    return " / ".join(line.removeprefix("=========").strip() for line in lines[1:8])
