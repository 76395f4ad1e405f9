"""`appliance model fetch REPO DST --revision REV`: bring a checkpoint from a hub."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.commands._packages import require_packages
from appliance.errors import ExitCode
from appliance.units import format_bytes

if TYPE_CHECKING:
    import argparse

HELP = "bring a checkpoint from a hub"

_SOURCES = ("hub", "modelscope")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("repository", metavar="REPO", help="owner/name")
    parser.add_argument("target", type=Path, metavar="DST", help="directory to make")
    parser.add_argument(
        "--revision",
        required=True,
        help="full commit id; a tag or branch is resolved to its commit, which the report names",
    )
    parser.add_argument(
        "--source",
        choices=_SOURCES,
        default="hub",
        help="hub: Hugging Face, or what HF_ENDPOINT names (default); modelscope: its package",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Fetch and print one summary line."""
    packages = ("numpy", "huggingface_hub") if arguments.source == "hub" else ("numpy",)
    require_packages("appliance model fetch", packages)
    from appliance.fetch.job import Job, fetch  # noqa: PLC0415 - numpy, this verb only
    from appliance.fetch.remote import HuggingFace, ModelScope  # noqa: PLC0415 - as above

    hub = HuggingFace() if arguments.source == "hub" else ModelScope()
    job = Job(arguments.source, arguments.repository, arguments.revision, arguments.target)
    begun = time.monotonic()
    report = fetch(job, hub, sys.stderr)
    taken = f"{time.monotonic() - begun:.1f} s"
    commit = report["commit"] or arguments.revision
    if arguments.json:
        sys.stdout.write(json.dumps(report) + "\n")
    elif report["replaced"]:
        names = ", ".join(report["replaced"])
        sys.stdout.write(f"replaced {names} in {arguments.target}, at {commit}, in {taken}\n")
    elif report["already_there"]:
        files = f"{len(report['files'])} files, {format_bytes(report['bytes'])}"
        sys.stdout.write(f"{arguments.target} is there already, whole: {files}, at {commit}\n")
    else:
        sys.stdout.write(
            f"fetched {len(report['files'])} files, {format_bytes(report['bytes'])}, of"
            f" {arguments.repository} at {commit} to {arguments.target} in {taken}\n"
        )
    return ExitCode.OK
