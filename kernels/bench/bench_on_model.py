"""Programs whose CUDA run time is the modelled V100: run them, and read the times of launches.

Benches of single operations share the rest: they place one call a case over data that does not
matter to time, after the checks of tests/kernels/vsim proved its kernels in the model's functional
mode. Such a bench starts itself with `--place CASE` to be the process on the model.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_report import REPOSITORY, parser_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

CHECKS = REPOSITORY / "tests" / "kernels" / "vsim"
TIMEOUT_S = 3600


class StoppedError(Exception):
    """A program ended otherwise than with 0; its last words."""


@dataclass(frozen=True)
class Case:
    """One case of a bench of single operations, by its name `KIND:SIZExSIZE...`."""

    kind: str
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, name: str) -> Case:
        kind, _, sizes = name.partition(":")
        return cls(kind, tuple(map(int, sizes.split("x"))))


def on_model(vsim: Path, command: list[str], **settings: str) -> str:
    """Output of a program, and the model's report after it.

    Args:
        vsim: The model's folder.
        command: The program.
        settings: Variables of the model; what the environment has of those that change times or
            results is left out.

    Raises:
        StoppedError: If the program did not end with 0.
    """
    environment = dict(os.environ, PYTHONPATH=str(REPOSITORY))
    for name in ("VSIM_FUNC", "VSIM_NOHMMA", "VSIM_PAR"):
        environment.pop(name, None)
    environment.setdefault("SIM_TIMEOUT", str(TIMEOUT_S))
    done = subprocess.run(
        [str(vsim / "run"), *command],
        env=environment | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = "\n".join(done.stderr.splitlines()[-3:])
        raise StoppedError(f"{command[-1]}: exit {done.returncode}: {said}")
    return done.stdout


def launches_us(report: str) -> list[float]:
    """Microseconds of each launch that the model reports, in order."""
    return [float(us) for us in re.findall(r"cycles=\d+\s+t=([\d.]+)us", report)]


def options_of(doc: str | None) -> argparse.ArgumentParser:
    """The options of a bench of single operations."""
    parser = parser_of(doc)
    parser.add_argument("library", type=Path)
    parser.add_argument("--vsim", type=Path, required=True)
    parser.add_argument("--place", metavar="CASE", help="be the process on the model")
    return parser


def check(options: argparse.Namespace, names: Iterable[str]) -> None:
    """Stop where a kernel is wrong."""
    command = [sys.executable, str(CHECKS / "sm70_run.py"), str(options.library), *names]
    output = on_model(options.vsim, command, VSIM_FUNC="1")
    (line,) = (each for each in output.splitlines() if each.startswith("RESULTS "))
    wrong = {k: v for k, v in json.loads(line.removeprefix("RESULTS ")).items() if v != "ok"}
    if wrong:
        raise SystemExit(f"a kernel is wrong, nothing was timed: {wrong}")


def time_case(options: argparse.Namespace, name: str, calls: int, **settings: str) -> list[float]:
    """Microseconds of the launches of the last of a case's calls, which this script places."""
    script = [sys.executable, sys.argv[0], str(options.library), "--vsim", str(options.vsim)]
    report = on_model(options.vsim, [*script, "--place", name], **settings)
    times = launches_us(report)
    return times[len(times) * (calls - 1) // calls :]


def print_rows(rows: Iterable[dict[str, Any]]) -> None:
    """Each row as it is made on stderr, the document on stdout."""
    made = []
    for row in rows:
        made.append(row)
        sys.stderr.write(json.dumps(row) + "\n")
    machine = "simulated V100, 1530/877 MHz, cold L2, +-15 %"
    sys.stdout.write(json.dumps({"machine": machine, "rows": made}, indent=1) + "\n")
