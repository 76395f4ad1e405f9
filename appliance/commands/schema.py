"""`appliance schema`: the JSON schema of the configuration file, or its reference page."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from appliance.config.reference import reference_page, schema_text
from appliance.errors import ExitCode

if TYPE_CHECKING:
    import argparse

HELP = "print the JSON schema of the configuration file"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--format",
        choices=("json", "markdown"),
        default="json",
        help="the schema itself (default) or the page docs/config.md",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print it and return 0."""
    sys.stdout.write(schema_text() if arguments.format == "json" else reference_page())
    return ExitCode.OK
