"""`appliance doctor`: name the cause behind an engine log; exit 0 if it has a name, 1 if not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.serve.diagnose import Diagnosis, Observation, diagnose, diagnose_hang, hang_of
from appliance.serve.diagnose_rules import BROADCAST_WAIT
from appliance.serve.remedy import Advice, advise, patch_of
from healthchecks.probes import DEFAULT_STATE_DIR

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

HELP = "name the cause behind an engine log"
LARGEST_LOG = 64 * 1024**2
ENDED = "ENGINE_FAILED"
UNNAMED = frozenset({ENDED, "UNKNOWN"})


def configure(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--log", metavar="FILE", help="engine or container log; - is stdin")
    place.add_argument(
        "--state-dir",
        default=DEFAULT_STATE_DIR,
        metavar="DIR",
        help="where the last run left its last lines (default: %(default)s)",
    )
    parser.add_argument(
        "--exit-code", type=int, metavar="N", help="exit status of the engine, if it is known"
    )
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")


def run(arguments: Namespace) -> int:
    """Read the log, print one diagnosis.

    Raises:
        ApplianceError: 2 if there is no log to read.
    """
    lines, returncode, said = _read(arguments)
    if arguments.exit_code is not None:
        returncode = arguments.exit_code
    diagnosis = _diagnose(lines, returncode, said)
    advice = advise(diagnosis, lines)
    if arguments.json:
        sys.stdout.write(json.dumps(_json(diagnosis, advice, said)) + "\n")
    else:
        sys.stdout.write(render_diagnosis(diagnosis, advice, said))
    return 1 if diagnosis.code in UNNAMED else 0


def _diagnose(lines: tuple[str, ...], returncode: int | None, said: str) -> Diagnosis:
    """Name the cause; of an engine that waited for itself, what was seen of it while it did."""
    diagnosis = diagnose(lines, returncode=returncode)
    if diagnosis.code != ENDED or not any(map(BROADCAST_WAIT.search, lines)):
        return diagnosis
    seen = hang_of(lines, said)
    return seen or diagnose_hang(lines, Observation())


def engine_lines(text: str) -> tuple[str, ...]:
    """Return the engine's lines of a log: of our event log (JSON or text), or the log as it is."""
    lines = (_engine_line(line) for line in text.splitlines())
    return tuple(line for line in lines if line)


def render_diagnosis(diagnosis: Diagnosis, advice: Advice, said: str) -> str:
    """Return the diagnosis for people; each change is YAML for the configuration file."""
    lines = [f"{diagnosis.code}: {diagnosis.what}"]
    lines += [f"  evidence: {line}" for line in diagnosis.evidence]
    if advice.equation:
        lines.append(f"  memory: {advice.equation}")
    lines.append(f"  do: {diagnosis.fix}")
    for change in advice.changes:
        ((section, keys),) = patch_of(change).items()
        inside = ", ".join(f"{key}: {json.dumps(value)}" for key, value in keys.items())
        lines.append(f"  change: {section}: {{{inside}}}")
    if said:
        lines.append(f"  the run said: {said}")
    return "\n".join(lines) + "\n"


def _engine_line(line: str) -> str:
    if line.startswith("{"):
        try:
            event = cast("dict[str, Any]", json.loads(line))
        except ValueError:
            return line
        if "event" in event and "level" in event:
            return str(event.get("line", "")) if event["event"] == "engine" else ""
        return line
    _, mark, text = line.partition(" engine line=")
    if not mark:
        return line
    try:
        return str(json.loads(text)) if text.startswith('"') else text
    except ValueError:
        return text


def _read(
    arguments: Namespace,
) -> tuple[tuple[str, ...], int | None, str]:
    """Return lines, exit status and message of the run, as far as they are known."""
    path = Path(arguments.state_dir) / "last_run.json"
    try:
        if arguments.log == "-":
            return engine_lines(sys.stdin.read(LARGEST_LOG)), None, ""
        if arguments.log is not None:
            path = Path(arguments.log)
            with path.open(encoding="utf-8", errors="replace") as file:
                return engine_lines(file.read(LARGEST_LOG)), None, ""
        last = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
        return tuple(last["lines"]), last["returncode"], str(last["message"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what, fix = "must be the log of an engine", "name a log with --log FILE"
        fault = Fault("NO_LOG", str(path), what, str(error), fix)
        raise ApplianceError(ExitCode.USAGE, fault) from error


def _json(diagnosis: Diagnosis, advice: Advice, said: str) -> dict[str, object]:
    return {
        "code": diagnosis.code,
        "what": diagnosis.what,
        "fix": diagnosis.fix,
        "evidence": list(diagnosis.evidence),
        "facts": dict(diagnosis.facts),
        "gpu_fault": diagnosis.gpu_fault,
        "memory": advice.equation,
        "changes": [patch_of(change) for change in advice.changes],
        "run": said,
    }
