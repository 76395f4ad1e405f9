"""`appliance doctor`: name the cause behind an engine log; exit 0 if it has a name, 1 if not."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.serve.diagnose import (
    Diagnosis,
    Observation,
    diagnose,
    diagnose_hang,
    hang_of,
    telling,
)
from appliance.serve.diagnose_rules import BROADCAST_WAIT, RULES
from appliance.serve.last_run import LastRun, killed_run, parse_fault, read_last_run
from appliance.serve.remedy import Advice, advise, patch_of
from healthchecks.probes import DEFAULT_STATE_DIR

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

HELP = "name the cause behind an engine log"
LARGEST_LOG = 64 * 1024**2
ENDED = "ENGINE_FAILED"
UNNAMED = frozenset({ENDED, "UNKNOWN"})
LAST_LINES = 10

_NAMED_BY_LINES = frozenset(rule.code for rule in RULES)
_ENGINE_ENDS = frozenset({ENDED, "ENGINE_DIED"})
_PORT_CLOSED = "keep its port open"
_LOG_LINE = re.compile(
    r"^(?:\([^)]*\) |\S+ |\S+ \S+ )?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b[ :]"
    r"|^Traceback \(|^[\w.]+(?:Error|Exception): |^error\[[A-Z0-9_]+\] |\(\w+ pid=\d+\)"
)


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
    last = _read(arguments)
    if arguments.exit_code is not None:
        last = replace(last, returncode=arguments.exit_code)
    diagnosis = None if arguments.log is not None else killed_run(_folder(arguments), last.at)
    if diagnosis is None:
        diagnosis = _diagnose(last)
    else:
        last = LastRun(())
    advice = advise(diagnosis, last.lines)
    shown = () if diagnosis.code in _NAMED_BY_LINES else telling(last.lines)[-LAST_LINES:]
    if arguments.json:
        sys.stdout.write(json.dumps(_json(diagnosis, advice, last.message, shown)) + "\n")
    else:
        sys.stdout.write(render_diagnosis(diagnosis, advice, last.message, shown))
    return 1 if diagnosis.code in UNNAMED else 0


def _folder(arguments: Namespace) -> Path:
    return Path(arguments.state_dir)


def _diagnose(last: LastRun) -> Diagnosis:
    """Name the cause: of an engine that the appliance ended, what the appliance had against it."""
    own = _named_by_run(last.fault)
    if own is not None and own.code == "DRAIN_TIMEOUT":
        return own  # the engine was well, whatever it wrote when it was ended
    diagnosis = diagnose(last.lines, returncode=last.returncode)
    if diagnosis.code != ENDED:
        return diagnosis
    waited = any(map(BROADCAST_WAIT.search, last.lines))
    seen = hang_of(last.lines, last.message)
    if seen is not None and (waited or seen.code not in UNNAMED):
        return seen
    return diagnose_hang(last.lines, Observation()) if waited else own or diagnosis


def _named_by_run(fault: Fault | None) -> Diagnosis | None:
    """Return the run's own cause, None if all it knew was that the engine had ended."""
    if fault is None or (fault.code in _ENGINE_ENDS and _PORT_CLOSED not in fault.what):
        return None
    return Diagnosis(fault.code, fault.what, fault.fix, (fault.value,))


def engine_lines(text: str) -> tuple[str, ...]:
    """Return the engine's lines of a log: of our event log (JSON or text), or the log as it is."""
    lines = (_engine_line(line) for line in text.splitlines())
    return tuple(line for line in lines if line)


def render_diagnosis(
    diagnosis: Diagnosis, advice: Advice, said: str, shown: Sequence[str] = ()
) -> str:
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
    lines += ["  the engine's last lines:", *(f"    {line}" for line in shown)] if shown else []
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


def _read(arguments: Namespace) -> LastRun:
    """Return what is known of the run."""
    if arguments.log is not None:
        return _read_log(arguments.log)
    folder = _folder(arguments)
    try:
        return read_last_run(folder)
    except FileNotFoundError as error:
        if killed_run(folder, 0.0) is not None:
            return LastRun(())
        raise _no_log(str(folder), "no run that failed there") from error
    except (OSError, ValueError) as error:
        raise _no_log(str(folder), str(error)) from error


def _read_log(name: str) -> LastRun:
    """Return the engine's lines of a log, and the last message of ours in it."""
    try:
        if name == "-":
            text = sys.stdin.read(LARGEST_LOG)
        else:
            with Path(name).open(encoding="utf-8", errors="replace") as file:
                text = file.read(LARGEST_LOG)
    except (OSError, ValueError) as error:
        raise _no_log(name, str(error)) from error
    lines = engine_lines(text)
    said = next((line for line in reversed(lines) if parse_fault(line)), "")
    if not lines or not text.strip():
        raise _no_log(name, "no line of an engine" if text.strip() else "nothing in it")
    if diagnose(lines).code == ENDED and not any(map(_is_log_line, text.splitlines())):
        raise _no_log(name, f"{len(lines)} lines and none of a log")
    engine = tuple(line for line in lines if not parse_fault(line))
    return LastRun(engine, message=said, fault=parse_fault(said))


def _is_log_line(line: str) -> bool:
    return bool(_LOG_LINE.search(line)) or _engine_line(line) != line


def _no_log(where: str, value: str) -> ApplianceError:
    what, fix = "must be the log of an engine", "name a log with --log FILE"
    return ApplianceError(ExitCode.USAGE, Fault("NO_LOG", where, what, value, fix))


def _json(
    diagnosis: Diagnosis, advice: Advice, said: str, shown: Sequence[str]
) -> dict[str, object]:
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
        "lines": list(shown),
    }
