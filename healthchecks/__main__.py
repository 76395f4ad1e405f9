"""`python -m healthchecks NAME... --plan plan.json [--json]`: single checks, and `hostcheck`.

Exit 0 for pass or warn, 1 for fail, 2 for unknown or when it cannot be told.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from healthchecks.collect import Depth
from healthchecks.plan import GatePlan, PlanError, plan_of
from healthchecks.policy import PolicyError
from healthchecks.registry import CHECKS
from healthchecks.result import Status
from healthchecks.runner import Options, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from healthchecks.report import Report

_CODES = {Status.PASS: 0, Status.WARN: 0, Status.FAIL: 1, Status.UNKNOWN: 2}
_CUDA = frozenset({"cuda", "functional", "pcie"})
"""Checks whose facts come from touching the GPUs."""


def main(words: Sequence[str]) -> int:
    """Run the named checks and return their exit code."""
    if list(words[:1]) == ["hostcheck"]:
        from healthchecks.hostcheck import main as hostcheck  # noqa: PLC0415 - only when asked for

        return hostcheck(words[1:])
    arguments = _parser().parse_args(words)
    try:
        plan = _plan(arguments.plan)
    except (PlanError, PolicyError, OSError, ValueError) as error:
        sys.stderr.write(f"{arguments.plan}: {error}\n")
        return _CODES[Status.UNKNOWN]
    deep = not _CUDA.isdisjoint(arguments.names)
    names = ("nvml", *(name for name in arguments.names if name != "nvml"))
    report = run(plan, Options(Depth(cuda=deep), remember=False, names=names))
    sys.stdout.write(report.to_json() if arguments.json else _text(report))
    return _CODES[report.verdict]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m healthchecks", description=__doc__)
    parser.add_argument(
        "names", nargs="+", choices=[*CHECKS], metavar="NAME", help=", ".join(CHECKS)
    )
    parser.add_argument("--plan", type=Path, required=True, help="the launch plan as JSON")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _plan(path: Path) -> GatePlan:
    plain = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(plain, dict):
        raise PlanError("not a launch plan")
    return plan_of(cast("dict[str, Any]", plain))


def _text(report: Report) -> str:
    """Return one line a judgement."""
    return "".join(
        f"{result.status.value.upper()} {result.id} {result.scope} {result.message}\n"
        for result in report.checks
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
