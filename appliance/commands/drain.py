"""`appliance drain`: stop taking requests and end when the last one is answered."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.serve.address import add_address_arguments, admin_address
from appliance.serve.ask import ask_admin
from appliance.units import format_seconds, parse_seconds
from healthchecks import probes

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

HELP = "stop taking requests and end when the last one is answered"
_POLL_S = 0.2


def configure(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    add_address_arguments(parser)
    parser.add_argument(
        "--wait",
        type=_duration,
        default=0.0,
        metavar="TIME",
        help="wait so long, as in 30s or 2m, for the appliance to end; a bare number is seconds "
        "(default: do not wait)",
    )


def run(arguments: Namespace) -> int:
    """Ask for the drain, and wait for its end if told to.

    Raises:
        ApplianceError: 41 if no appliance answers, 50 if it has not ended in time.
    """
    ask_admin(arguments, "POST", "/drain")
    sys.stdout.write("draining\n")
    if arguments.wait > 0:
        _wait(*admin_address(arguments), arguments.wait)
        sys.stdout.write("ended\n")
    return 0


def _duration(text: str) -> float:
    try:
        return parse_seconds(f"{text}s" if text.strip()[-1:].isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {error}, got {text!r}") from None


def _wait(host: str, port: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            probes.ask("/health/live", host, port, _POLL_S * 10)
        except ConnectionError:
            return
        except OSError:
            pass  # slow is not gone
        time.sleep(_POLL_S)
    what = f"the appliance must end within {format_seconds(seconds)} (--wait)"
    fix = (
        "see `appliance status`; a second `appliance drain` changes nothing, SIGTERM cuts it short"
    )
    fault = Fault("DRAIN_NOT_OVER", f"{host}:{port}", what, "still answering", fix)
    raise ApplianceError(ExitCode.DRAIN_TIMEOUT, fault)
