"""`appliance plan`: what would be launched, why, and what every card's memory holds."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.commands._planning import add_options, planned
from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.plan.chart import report
from appliance.units import MIB

if TYPE_CHECKING:
    import argparse

_LARGEST_PLAN = MIB

HELP = "show what would be launched, why, and what every card's memory holds"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print the plan itself")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the plan to a file as well"
    )


def run(arguments: argparse.Namespace) -> int:
    """Plan, print, write and return 0.

    Raises:
        ApplianceError: Exit 10, 11, 30, 31 or 32, with every fault.
    """
    plan = planned(arguments).plan
    if arguments.output is not None:
        write_plan(plan.to_json(), arguments.output)
    if arguments.json:
        sys.stdout.write(plan.to_json())
        return ExitCode.OK
    width = shutil.get_terminal_size((80, 24)).columns
    sys.stdout.write(report(plan, width=width, unicode=_unicode()))
    return ExitCode.OK


def write_plan(text: str, path: Path) -> None:
    """Write the plan whole or not at all; only an empty file or an older plan is replaced.

    Raises:
        ApplianceError: Exit 2 if the file cannot be written, or is of another origin.
    """
    path = Path(os.path.realpath(path))  # a link is written through; `.` gets a name
    beside = path.parent / f".{path.name}.{os.getpid()}"
    try:
        if os.path.lexists(path) and not _is_plan(path):
            raise FileExistsError(errno.EEXIST, "a file of another origin")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        fix = "name a file in a directory that you may write to"
        reason = error.strerror or type(error).__name__
        fault = Fault("OUTPUT_FILE", str(path), "a new file, or a plan to replace", reason, fix)
        raise ApplianceError(ExitCode.USAGE, fault) from None


def _is_plan(path: Path) -> bool:
    """Whether a file is empty or a plan; a pipe, a device or a directory is neither."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_PLAN:
        return False
    try:
        found: object = json.loads(path.read_bytes() or b'{"plan_version": 0}')
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "plan_version" in found


def _unicode() -> bool:
    """Blocks only where the terminal can show them; a file or pipe gets them in UTF-8 too."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
