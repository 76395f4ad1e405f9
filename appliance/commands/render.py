"""`appliance render`: flags, environment, compose override and Kubernetes patch of the plan."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.commands._planning import add_options, planned
from appliance.errors import ApplianceError, ExitCode
from appliance.render.argv import engine_command, vllm_argv
from appliance.render.compose import FILE_NAME, adds_nothing, compose_override
from appliance.render.environ import child_environment, environment
from appliance.render.generated import DRIFT_EXIT, drift, drift_fault, header, write_generated
from appliance.render.kubernetes import kubernetes_patch
from appliance.render.text import argv_text, environment_text

if TYPE_CHECKING:
    import argparse

    from appliance.commands._planning import Planned

HELP = "print flags, environment and compose override of the plan"
FORMATS = ("argv", "env", "compose", "k8s")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_options(parser)
    parser.add_argument(
        "--format", choices=(*FORMATS, "all"), default="all", help="what to render (default: all)"
    )
    parser.add_argument(
        "--explain", action="store_true", help="follow every flag and variable by its origin"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the one format to FILE, if it is absent or was rendered before",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"write nothing; exit {int(DRIFT_EXIT)} with a diff if FILE is out of date "
        f"(default: {FILE_NAME})",
    )
    parser.set_defaults(usage_error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Render and return 0, or the exit code of drift.

    Raises:
        ApplianceError: If there is no plan, or a file is out of date or not ours.
    """
    _settle(arguments)
    basis = planned(arguments)
    if arguments.check:
        return _check(basis, arguments)
    if arguments.output is not None:
        write_generated(arguments.output, _file_text(basis, arguments.format))
    elif arguments.json:
        sys.stdout.write(json.dumps(_as_json(basis, arguments.format), indent=2) + "\n")
    else:
        sys.stdout.write(_for_people(basis, arguments.format, explain=arguments.explain))
    return ExitCode.OK


def _settle(arguments: argparse.Namespace) -> None:
    """Refuse options that contradict each other; fill in what `--check` means by itself."""
    if arguments.check and arguments.output is None and arguments.format in ("all", "compose"):
        arguments.output, arguments.format = Path(FILE_NAME), "compose"
    if arguments.check and arguments.output is None:
        arguments.usage_error("--check needs -o FILE for this --format")
    if arguments.output is not None and arguments.format == "all":
        arguments.usage_error("-o needs one --format: argv, env, compose or k8s")
    if arguments.output is not None and (arguments.explain or arguments.json):
        arguments.usage_error("-o takes neither --explain nor --json")


def _check(basis: Planned, arguments: argparse.Namespace) -> int:
    """Compare the file with what would be rendered; an override that adds nothing may be absent."""
    text = _file_text(basis, arguments.format)
    absent = not os.path.lexists(arguments.output)
    if absent and arguments.format == "compose" and adds_nothing(text):
        return ExitCode.OK
    difference = drift(arguments.output, text)
    if difference:
        sys.stdout.write(difference)
        raise ApplianceError(DRIFT_EXIT, drift_fault(arguments.output, difference))
    return ExitCode.OK


def _text(basis: Planned, what: str, *, explain: bool = False) -> str:
    plan = basis.plan
    if what == "argv":
        return argv_text(vllm_argv(plan), explain=explain)
    if what == "env":
        variables = environment(plan)
        _, dropped = child_environment(variables, os.environ)
        return environment_text(variables, explain=explain, dropped=dropped)
    if what == "compose":
        return compose_override(plan, basis.loaded.config)
    return kubernetes_patch(plan)


def _file_text(basis: Planned, what: str) -> str:
    text = _text(basis, what)
    return text if what in ("compose", "k8s") else f"{header(basis.plan.config_sha256)}\n{text}"


def _for_people(basis: Planned, what: str, *, explain: bool) -> str:
    if what != "all":
        return _text(basis, what, explain=explain)
    titles = {"argv": "flags", "env": "environment", "compose": FILE_NAME, "k8s": "kubernetes"}
    parts = (f"## {titles[name]}\n{_text(basis, name, explain=explain)}" for name in FORMATS)
    return "\n".join(parts)


def _as_json(basis: Planned, what: str) -> dict[str, object]:
    """Return what was asked for; flags and variables always with their origin."""
    plan = basis.plan
    items, variables = vllm_argv(plan), environment(plan)
    _, dropped = child_environment(variables, os.environ)
    everything: dict[str, dict[str, object]] = {
        "argv": {
            "command": list(engine_command(items)),
            "argv": [{"words": list(item.words), "origin": item.origin} for item in items],
        },
        "env": {
            "environment": [
                {"name": v.name, "value": v.value, "origin": v.origin} for v in variables
            ],
            "dropped": list(dropped),
        },
        "compose": {"compose": _text(basis, "compose")},
        "k8s": {"kubernetes": _text(basis, "k8s")},
    }
    chosen = FORMATS if what == "all" else (what,)
    result: dict[str, object] = {"config_sha256": plan.config_sha256}
    for name in chosen:
        result |= everything[name]
    return result
