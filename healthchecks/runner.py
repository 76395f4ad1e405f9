"""One run of the gate on the live machine: remember, measure, judge, remember again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from healthchecks import sysfs
from healthchecks.collect import Depth, collect
from healthchecks.context import Context
from healthchecks.facts import HostFacts
from healthchecks.history import acknowledge, advance, refresh
from healthchecks.hold import hold_gpus
from healthchecks.judge import judge, without_measuring
from healthchecks.registry import CHECKS
from healthchecks.state import State
from healthchecks.state_file import StateFile, StateUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from healthchecks.overrides import Applied
    from healthchecks.plan import GatePlan
    from healthchecks.report import Report

MIN_REASON = 8
"""Letters of a reason that say something."""


@dataclass(frozen=True)
class Options:
    """How one run goes.

    Attributes:
        depth: How deep to look.
        keep_hold: Whether this process keeps the GPUs to itself from now on.
        remember: Whether what was seen is written to the state file.
        names: Checks to run.
        read: Reads the machine; a recorded one may stand in.
    """

    depth: Depth = field(default_factory=Depth)
    keep_hold: bool = False
    remember: bool = True
    names: Sequence[str] = tuple(CHECKS)
    read: Callable[[GatePlan, Depth], HostFacts] = collect


def run(plan: GatePlan, options: Options | None = None) -> Report:
    """Judge the live machine for a plan and keep what was seen for the next run."""
    options = options or Options()
    if not plan.uses_gpu or plan.policy.mode == "off":
        return without_measuring(plan, options.names)
    file = StateFile(Path(plan.policy.state_dir))
    action = file.required_action(sysfs.boot_id(options.depth.root))
    if action is not None:
        # Whoever touches the GPUs now may hang, so nothing is read.
        return judge(Context(HostFacts(host_action=action), plan), ("latches",))
    try:
        with file.locked():
            return _run_with(file, plan, options)
    except StateUnavailableError as error:
        note = State(trusted=False, note=f"{error}: nothing can be remembered")
        return judge(_context(plan, options, note, ()), options.names)


def _run_with(file: StateFile, plan: GatePlan, options: Options) -> Report:
    holders = hold_gpus(file.folder, plan.uuids, keep=options.keep_hold)
    state = file.load()
    context = _context(plan, options, state, tuple(sorted(holders.items())))
    report = judge(context, options.names)
    if not options.remember:
        return report
    moved = advance(context.state, context.facts, context.now)
    file.save(moved, "gate")
    for use in report.overrides:
        file.audit(_override_line(use, report))
    return report


def _context(
    plan: GatePlan, options: Options, state: State, holders: Iterable[tuple[str, str]]
) -> Context:
    facts = replace(options.read(plan, options.depth), holders=dict(holders))
    return Context(facts, plan, state=refresh(state, facts), now=datetime.now(UTC))


def _override_line(use: Applied, report: Report) -> dict[str, str]:
    return {
        "at": report.generated_at.isoformat(timespec="seconds"),
        "event": "override",
        "check": use.override.check,
        "scope": use.scope,
        "by": use.override.by,
        "reason": use.override.reason,
        "until": use.override.until.isoformat(),
        "config_sha256": report.plan.config_sha256,
        "status_before": use.before.value,
        "status_after": use.after.value,
    }


def ack(folder: Path, check: str, uuid: str, *, by: str, reason: str) -> None:
    """Acknowledge a fault; the audit log says who and why.

    Raises:
        AckError: If there is nothing to acknowledge, or the reason says nothing.
        StateUnavailableError: If the state cannot be written.
    """
    now = datetime.now(UTC)
    file = StateFile(folder)
    with file.locked():
        fresh = acknowledge(file.load(), check, uuid, by=by, reason=reason, now=now)
        file.save(fresh, "ack")
        file.audit(
            {
                "at": now.isoformat(timespec="seconds"),
                "event": "ack",
                "check": check,
                "scope": f"gpu:{uuid}",
                "by": by,
                "reason": reason,
            }
        )
