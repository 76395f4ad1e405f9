"""The option `--lenient` of the verbs that read a checkpoint without a configuration file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.checkpoint.rules import Lenient

if TYPE_CHECKING:
    import argparse


def add_lenient(parser: argparse.ArgumentParser) -> None:
    """Add the option; its value is a `Lenient`."""
    parser.add_argument(
        "--lenient",
        type=Lenient,
        choices=tuple(Lenient),
        default=Lenient.NONE,
        help="tensors-win: read packed weights of modules that the exclude list names, with a"
        " warning, as `model.lenient: tensors-win` does in serving (default: none, refuse them)",
    )
