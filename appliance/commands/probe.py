"""`appliance probe startup|live|ready`: answer an orchestrator in milliseconds; exit 0 or 1."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from appliance.serve.address import AddressError, add_address_arguments, admin_address
from healthchecks import probes

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

HELP = "answer an orchestrator: startup, live or ready"


def configure(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("kind", choices=("startup", "live", "ready"), help="what is asked")
    add_address_arguments(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=probes.DEFAULT_TIMEOUT_S,
        metavar="S",
        help="seconds until no answer is a failure (default: %(default)s)",
    )


def run(arguments: Namespace) -> int:
    """Ask, print one reason line, return 0 or 1: an orchestrator knows no third code."""
    try:
        host, port = admin_address(arguments)
    except AddressError as error:
        sys.stdout.write(f"ADDRESS {error}\n")
        return 1
    return probes.probe(arguments.kind, host, port, arguments.timeout)
