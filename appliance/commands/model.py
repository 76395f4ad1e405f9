"""`appliance model VERB`: inspect, verify, digest, fetch or import a checkpoint.

Each verb is a module `appliance.commands.model_<verb>` with HELP, configure and run, of which this
one registers those that are there. Their top levels import nothing heavy.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

HELP = "inspect, verify, digest, fetch or import a checkpoint"

_VERBS = ("inspect", "verify", "digest", "fetch", "import-gguf")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add one sub-command for every verb whose module is there."""
    verbs = parser.add_subparsers(dest="model_verb", metavar="VERB", required=True)
    for verb in _VERBS:
        if importlib.util.find_spec(_module_name(verb)) is not None:
            module = importlib.import_module(_module_name(verb))
            text = str(module.HELP)
            module.configure(
                verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
            )


def run(arguments: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    return int(importlib.import_module(_module_name(arguments.model_verb)).run(arguments))


def _module_name(verb: str) -> str:
    return f"appliance.commands.model_{verb.replace('-', '_')}"
