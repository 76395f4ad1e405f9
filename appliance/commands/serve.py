"""`appliance serve`: gate, launch and supervise the engine; the container's one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from appliance.serve.signals import StopSignals

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

HELP = "gate, launch and supervise the engine"


def configure(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the configuration file (default: config/appliance.yaml)",
    )
    parser.add_argument(
        "--published",
        action="store_true",
        help="the container's engine publishes both ports on server.host and server.admin_host, "
        "so listen on every address inside",
    )


def run(arguments: Namespace) -> int:
    """Serve until a stop signal, 0 then; every other end is an ApplianceError with its code.

    Raises:
        ApplianceError: With the exit code of whatever refused or ended the run.
    """
    stop = StopSignals()
    # Only now: the rest takes a second to import, and a stop signal must find its handler.
    from appliance.commands._serving import serve_config  # noqa: PLC0415

    return serve_config(arguments.config, stop, published=arguments.published)
