"""Accepted deviations: each softens one check on one GPU until a day and up to a bound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from healthchecks.policy import OVERRIDE_DAYS, Override
from healthchecks.result import CheckResult, Severity, Status

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import date


@dataclass(frozen=True)
class Applied:
    """One use of an override."""

    override: Override
    scope: str
    before: Status
    after: Status


def apply_overrides(
    results: Sequence[CheckResult], overrides: Sequence[Override], today: date
) -> tuple[tuple[CheckResult, ...], tuple[Applied, ...]]:
    """Return the results after every override that holds, and the uses.

    An override that has expired, reaches too far ahead or is passed by the value adds a warning.
    """
    found = list(results)
    applied: list[Applied] = []
    notes: list[CheckResult] = []
    for override in overrides:
        for place, result in enumerate(found):
            if result.id != override.check or override.gpu not in _names(result.scope):
                continue
            if result.status not in (Status.FAIL, Status.UNKNOWN):
                continue
            if reason := _lapsed(override, result, today):
                notes.append(_note(override, result, reason))
                continue
            found[place] = replace(result, status=Status.WARN, overridden_by=override.by)
            applied.append(Applied(override, result.scope, result.status, Status.WARN))
    return (*found, *notes), tuple(applied)


def _names(scope: str) -> tuple[str, ...]:
    """Return what an override may call the thing: `host`, a UUID, or either UUID of a pair."""
    return tuple(scope.partition(":")[2].split(",")) if ":" in scope else (scope,)


def _lapsed(override: Override, result: CheckResult, today: date) -> str | None:
    if result.fixed:
        return f"{result.id} cannot be overridden"
    if today > override.until:
        return f"expired on {override.until}"
    if override.until > today + timedelta(days=OVERRIDE_DAYS):
        return f"until {override.until} is more than {OVERRIDE_DAYS} days ahead"
    # A fault that is a yes or no counts as 1.
    value = 1.0 if result.value is None else result.value
    if value > override.bound:
        return f"the value {value:g} is above its bound {override.bound:g}"
    return None


def _note(override: Override, result: CheckResult, reason: str) -> CheckResult:
    return CheckResult(
        id="gate.override",
        scope=result.scope,
        status=Status.WARN,
        observed=reason,
        expected="an override that holds",
        message=f"override of {override.check} by {override.by} does not hold: {reason}",
        remedy="remove or renew it in gate.overrides",
        remedy_scope="edit_config",
        source="config",
        severity=Severity.SOFT,
    )
