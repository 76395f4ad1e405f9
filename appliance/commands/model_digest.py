"""`appliance model digest PATH`: the identity of the weights, whatever container holds them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.commands._lenient import add_lenient
from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    import argparse

    from appliance.checkpoint.identity import Fingerprint, Identity

HELP = "print SHA-256 of each module's canonical values, whatever container holds them"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("path", type=Path, metavar="PATH", help="a checkpoint or a container file")
    parser.add_argument(
        "--index", type=Path, metavar="FILE", help="quasar_index.json of a legacy container"
    )
    add_lenient(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Hash every tensor, print and return 0.

    Raises:
        ApplianceError: Exit 30 or 31 if the checkpoint is refused.
    """
    if importlib.util.find_spec("numpy") is None:
        what, fix = "the package numpy is installed", "run `pip install numpy`"
        fault = Fault("PACKAGE_MISSING", "appliance model digest", what, "no numpy", fix)
        raise ApplianceError(ExitCode.USAGE, fault)
    from appliance.checkpoint.identity import identify  # noqa: PLC0415 - heavy, this verb only

    identity = identify(arguments.path, arguments.index, lenient=arguments.lenient)
    for note in identity.notes:
        sys.stderr.write(f"warning {note}\n")
    if arguments.json:
        sys.stdout.write(json.dumps(_as_json(arguments.path, identity), indent=2) + "\n")
    else:
        sys.stdout.write(_as_lines(identity))
    return ExitCode.OK


def _as_json(path: Path, identity: Identity) -> dict[str, object]:
    return {
        "path": str(path),
        "weights_sha256": identity.weights_sha256,
        "modules": {name: _entry(found) for name, found in identity.modules.items()},
        "dense": {name: _entry(found) for name, found in identity.dense.items()},
        "notes": list(identity.notes),
    }


def _entry(found: Fingerprint) -> dict[str, object]:
    entry: dict[str, object] = {
        "form": found.form,
        "shape": list(found.shape),
        "sha256": found.sha256,
    }
    return entry | {"sum": found.total} if found.form in ("nvfp4", "fp8") else entry


def _as_lines(identity: Identity) -> str:
    """Return lines as `sha256sum` prints them, modules first, then the dense tensors."""
    found = [*sorted(identity.modules.items()), *sorted(identity.dense.items())]
    lines = [f"{each.sha256}  {name}  {each.form} {list(each.shape)}\n" for name, each in found]
    return "".join([*lines, f"{identity.weights_sha256}  all quantized modules\n"])
