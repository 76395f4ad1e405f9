"""`appliance model import-gguf FILE.gguf DST`: a Hugging Face FP16 directory of a GGUF file."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    import argparse

HELP = "make a Hugging Face FP16 directory of a GGUF file"

_PACKAGES = ("numpy", "gguf", "tokenizers")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("source", type=Path, metavar="FILE.gguf", help="the GGUF file")
    parser.add_argument("target", type=Path, metavar="DST", help="the directory to make")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Import the file and print one summary line."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ApplianceError(
            ExitCode.USAGE,
            Fault(
                "PACKAGE_MISSING",
                "appliance model import-gguf",
                f"the packages {', '.join(_PACKAGES)} are installed",
                f"no {', '.join(missing)}",
                f"run `pip install {' '.join(missing)}`",
            ),
        )
    from appliance.checkpoint.gguf import import_gguf  # noqa: PLC0415 - heavy, this verb only

    begun = time.monotonic()
    report = import_gguf(arguments.source, arguments.target)
    if arguments.json:
        sys.stdout.write(json.dumps(asdict(report)) + "\n")
    else:
        sys.stdout.write(
            f"imported {report.source}: {report.weights / 1e6:.1f} M weights in {report.tensors}"
            f" tensors to {arguments.target} in {time.monotonic() - begun:.1f} s\n"
        )
    return ExitCode.OK
