"""`appliance model verify DIR`: whether a checkpoint is whole, without torch and in seconds."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.checkpoint.container import check_payload
from appliance.checkpoint.legacy import is_quasar, open_container
from appliance.checkpoint.verify import Verification, verify
from appliance.commands._lenient import add_lenient
from appliance.errors import ExitCode

if TYPE_CHECKING:
    import argparse

HELP = "check index, sizes, digests, tokenizer and chat template of a checkpoint"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "directory", type=Path, metavar="PATH", help="a checkpoint's directory or a container file"
    )
    parser.add_argument(
        "--index", type=Path, metavar="FILE", help="quasar_index.json of a legacy container"
    )
    parser.add_argument(
        "--no-hashes", action="store_true", help="do not compare the files with SHA256SUMS"
    )
    add_lenient(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Verify, print and return 0.

    Raises:
        ApplianceError: Exit 31 if a file is corrupt, 30 if the checkpoint is not served.
    """
    begun = time.monotonic()
    if is_quasar(arguments.directory):
        return _verify_container(arguments)
    hashes, lenient = not arguments.no_hashes, arguments.lenient
    found = verify(arguments.directory, hashes=hashes, lenient=lenient)
    warnings = [check.detail for check in found.checks if check.result == "warn"]
    notes = [*found.summary.notes, *warnings]
    for note in notes:
        if "W_" in note:
            sys.stderr.write(f"warning {note}\n")
    if arguments.json:
        report = _as_json(found, notes) | {"elapsed_s": round(time.monotonic() - begun, 3)}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        lines = [f"{check.result:<6}{check.name:<16}{check.detail}\n" for check in found.checks]
        sys.stdout.write("".join(lines))
    return ExitCode.OK


def _verify_container(arguments: argparse.Namespace) -> int:
    """Check directory, extents and checksums of a QUASAR container."""
    container = open_container(arguments.directory, arguments.index)
    if not arguments.no_hashes:
        check_payload(container)
    has_sums = container.has_checksums and not arguments.no_hashes
    detail = f"{len(container.tensors)} tensors, {'with' if has_sums else 'without'} checksums"
    if arguments.json:
        checks = [{"name": "container", "result": "pass", "detail": detail}]
        report = {"path": str(container.path), "verdict": "pass", "checks": checks}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        sys.stdout.write(f"{'pass':<6}{'container':<16}{detail}\n")
    return ExitCode.OK


def _as_json(found: Verification, notes: list[str]) -> dict[str, object]:
    return {
        "path": str(found.summary.path),
        "verdict": "pass",
        "format": found.summary.format,
        "producer": found.summary.producer,
        "checks": [
            {"name": check.name, "result": check.result, "detail": check.detail}
            for check in found.checks
        ],
        "notes": notes,
    }
