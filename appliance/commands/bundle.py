"""`appliance bundle`: one archive with what somebody who helps needs to know, without secrets."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from appliance.bundle.archive import manifest_of, pack, refuse_existing, write_whole
from appliance.commands._bundle_parts import Parts
from appliance.commands._planning import add_options
from appliance.errors import ExitCode
from appliance.serve.metrics import package_version
from appliance.units import format_bytes

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

HELP = "write one archive for whoever helps: configuration, plan, machine, state, log; no secrets"


def configure(parser: ArgumentParser) -> None:
    """Add the options."""
    add_options(parser)
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="where the appliance keeps its state (default: gate.state_dir)",
    )
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="log of the service; its last 2 MiB are put in"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the archive (default: appliance-bundle-TIME.tar.gz in this directory)",
    )
    parser.add_argument("--force", action="store_true", help="replace the archive if it is there")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")


def run(arguments: Namespace) -> int:
    """Collect, write, print what is inside and return 0, whatever could not be had.

    Raises:
        ApplianceError: Exit 2 if the archive is there already, 12 if it cannot be written.
    """
    made_at = datetime.now(UTC)
    output: Path = arguments.output or Path(f"appliance-bundle-{made_at:%Y%m%dT%H%M%SZ}.tar.gz")
    refuse_existing(output, force=arguments.force)
    parts = Parts(arguments)
    entries = parts.collect()
    manifest = cast(
        "dict[str, Any]",
        parts.clean(manifest_of(entries, version=package_version(), made_at=made_at)),
    )
    content = pack(entries, manifest, made_at)
    write_whole(output, content, force=arguments.force)
    if arguments.json:
        sys.stdout.write(json.dumps(manifest, indent=2) + "\n")
    else:
        sys.stdout.write(_for_people(output, len(content), manifest))
    return ExitCode.OK


def _for_people(output: Path, size: int, manifest: dict[str, Any]) -> str:
    rows = [f"{output}  {format_bytes(size)}, readable by its owner alone"]
    rows += [f"  {part['path']:<24} {format_bytes(part['bytes'])}" for part in manifest["files"]]
    rows += [f"  {part['path']:<24} not had: {part['reason']}" for part in manifest["missing"]]
    rows.append("secrets were taken out; read it before you send it")
    return "\n".join(rows) + "\n"
