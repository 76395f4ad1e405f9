"""`appliance convert SRC DST --to FORM`: rewrite a checkpoint, weight for weight."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.commands._lenient import add_lenient
from appliance.commands._packages import require_packages
from appliance.errors import ExitCode

if TYPE_CHECKING:
    import argparse

HELP = "rewrite a checkpoint in another form without changing a weight"

_FORMS = ("fp16", "compressed-tensors", "modelopt", "quasar-st", "container")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("source", type=Path, metavar="SRC", help="checkpoint directory, or a .qsr")
    parser.add_argument("target", type=Path, metavar="DST", help="directory to make")
    parser.add_argument(
        "--to",
        choices=_FORMS,
        required=True,
        help="fp16: decoded, dense; compressed-tensors, modelopt, quasar-st: names and globals of"
        " that form; container: one file model.qsr",
    )
    parser.add_argument(
        "--allow-rounding",
        action="store_true",
        help="accept that turning a global from divisor to multiplier moves weights by up to"
        " 1.2e-7 of their value",
    )
    add_lenient(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Convert and print one summary line."""
    require_packages("appliance convert", ("numpy",))
    from appliance.convert.job import Job, convert  # noqa: PLC0415 - numpy, this verb only
    from appliance.convert.target import Target  # noqa: PLC0415 - numpy, this verb only

    form = Target(arguments.to)
    rounding, lenient = arguments.allow_rounding, arguments.lenient
    report = convert(Job(arguments.source, arguments.target, form, rounding, lenient))
    for note in report.get("notes", []):
        sys.stderr.write(f"warning {note}\n")
    if arguments.json:
        sys.stdout.write(json.dumps(report) + "\n")
        return ExitCode.OK
    if report["already_there"]:
        made = f"{arguments.target} is there already, made by the same job"
        sys.stdout.write(f"{made} from the same source; nothing was written\n")
        return ExitCode.OK
    proof = "values decoded" if form is Target.FP16 else f"digest {report['weights_sha256'][:12]}"
    if report["inexact_modules"]:
        count, difference = len(report["inexact_modules"]), report["largest_difference"]
        proof += f", {count} matrices moved by up to {difference:.1e}"
    sys.stdout.write(
        f"converted {report['modules']} matrices and {report['dense']} dense tensors to {form}"
        f" in {arguments.target}: {proof}, {len(report['dropped'])} unread tensors left out\n"
    )
    return ExitCode.OK
