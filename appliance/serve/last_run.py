"""What the last run left in the state directory, as `doctor` reads it; nothing is changed there."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from appliance.errors import Fault
from appliance.serve import state
from appliance.serve.diagnose import Diagnosis

if TYPE_CHECKING:
    from pathlib import Path

LAST_RUN_FILE = "last_run.json"
"""How the last run ended that was not asked to, with the engine's last lines."""

_FAULT = re.compile(
    r"^error\[(?P<code>[A-Z0-9_]+)\] (?P<where>.+?): (?P<what>.+?), got (?P<value>.*);"
    r" (?P<fix>.+)\.$"
)


@dataclass(frozen=True)
class LastRun:
    """One run that ended.

    Attributes:
        lines: The engine's last lines, oldest first.
        returncode: The engine's exit status, None if it is not known.
        message: The run's own last word, empty if it said none.
        fault: The same in its parts, None if it is not one of ours.
        at: When it ended.
    """

    lines: tuple[str, ...]
    returncode: int | None = None
    message: str = ""
    fault: Fault | None = None
    at: float = 0.0


def read_last_run(folder: Path) -> LastRun:
    """Read what the last run left.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not what a run leaves.
    """
    last = json.loads((folder / LAST_RUN_FILE).read_text(encoding="utf-8"))
    try:
        message, parts = str(last["message"]), last.get("fault")
        return LastRun(
            lines=tuple(map(str, last["lines"])),
            returncode=last["returncode"],
            message=message,
            fault=Fault(**parts) if parts else parse_fault(message),
            at=float(last.get("at", 0.0)),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not what a run leaves: {error!r}") from error


def parse_fault(message: str) -> Fault | None:
    """Return the parts of a message `error[CODE] WHERE: WHAT, got VALUE; FIX.`, None for others."""
    found = _FAULT.match(message)
    return None if found is None else Fault(**found.groupdict())


def killed_run(folder: Path, since: float) -> Diagnosis | None:
    """Return why a run after `since` left no word: it, or the host, was ended from outside."""
    record = state.read_record(folder)
    running, ends = record.running, record.ends
    if running is not None and running.at > since and not state.is_held(folder):
        seen = f"it began {_clock(running.at)} and no end of it is kept"
        if state.rebooted(record, boot_id=state.boot_id()):
            what = "the host went down while the last run served"
            return Diagnosis("UNCLEAN_REBOOT", what, "check power supply and cooling", (seen,))
        return _unclean(seen)
    if ends and ends[-1].code == "UNCLEAN_STOP" and ends[-1].at > since:
        return _unclean(f"the start at {_clock(ends[-1].at)} found no end of the run before it")
    return None


def _unclean(seen: str) -> Diagnosis:
    return Diagnosis(
        "UNCLEAN_STOP",
        "the last run was killed and could say nothing (SIGKILL, out of memory)",
        "look for an OOM kill in `dmesg`, and for a stop whose grace period was shorter than "
        "server.drain_timeout; its lines are in the container's log (`doctor --log FILE`)",
        (seen,),
    )


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
