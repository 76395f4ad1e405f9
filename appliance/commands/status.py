"""`appliance status`: print what a running appliance is doing."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, cast

from appliance.serve.address import add_address_arguments
from appliance.serve.ask import ask_admin

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

HELP = "print what a running appliance is doing"


def configure(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    add_address_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(arguments: Namespace) -> int:
    """Ask and print.

    Raises:
        ApplianceError: 41 if no appliance answers.
    """
    body = ask_admin(arguments, "GET", "/status")
    if arguments.json:
        sys.stdout.write(body.strip() + "\n")
    else:
        sys.stdout.write(render_status(cast("dict[str, Any]", json.loads(body))))
    return 0


def render_status(status: dict[str, Any]) -> str:
    """Return the status for people: one thing a line, what is wrong last."""
    api, engine, requests = status["api"], status["engine"], status["requests"]
    probes = [
        f"{name} {'ok' if answer['ok'] else 'FAIL'} ({answer['reason']})"
        for name, answer in status["probes"].items()
    ]
    canary = status["canary"]
    alive = "alive" if engine["alive"] else "not alive"
    lines = [
        f"phase     {status['phase']} for {status['phase_seconds']:.0f} s",
        f"probes    {', '.join(probes)}",
        f"model     {status['model']['served_name']} from {status['model']['path']}",
        f"api       http://{api['host']}:{api['port']}/v1",
        f"engine    pid {engine['pid']}, {alive}, start {engine['attempt']}",
        f"requests  {requests['in_flight']} in flight, {requests['accepted']} accepted",
    ]
    if canary is not None:
        lines.append(
            f"canary    {canary['tokens_per_second']:.1f} tokens/s with {canary['concurrent']} "
            f"requests, longest prompt {canary['long_prompt_tokens']} tokens"
        )
    if status["safer_settings"]:
        lines.append(f"safer     {', '.join(status['safer_settings'])}")
    if status["recent_ends"]:
        lines.append(f"ends      {status['recent_ends']} counted by runtime.restart_budget")
    if status["config"]["drift"]:
        lines.append(f"config    {status['config']['path']} was edited; restart to use it")
    lines += [status[key] for key in ("fault", "gpu_fault") if status[key] is not None]
    return "\n".join(lines) + "\n"
