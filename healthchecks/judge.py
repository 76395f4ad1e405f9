"""From facts to a report: run the checks, apply overrides, decide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.facts import HostFacts
from healthchecks.launch import launch_of
from healthchecks.overrides import apply_overrides
from healthchecks.registry import CHECKS, run_checks
from healthchecks.report import Report
from healthchecks.result import CheckResult, Severity, Status
from healthchecks.verdict import OK, no_gpu, soften_unknown, verdict_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from healthchecks.context import Context
    from healthchecks.plan import GatePlan


def judge(context: Context, names: Iterable[str] = CHECKS) -> Report:
    """Judge one machine for one plan; pure, the same values give the same report."""
    results = run_checks(context, names)
    policy = context.policy
    results, applied = apply_overrides(results, policy.overrides, context.now.date())
    results = soften_unknown(results, policy.on_unknown)
    results = (*results, *_mode_note(context))
    verdict = verdict_of(results, policy.mode)
    return Report(
        plan=context.plan,
        facts=context.facts,
        checks=results,
        verdict=verdict.status,
        exit_code=verdict.exit_code,
        launch=launch_of(context, results),
        overrides=applied,
        generated_at=context.now,
    )


def without_measuring(plan: GatePlan, names: Iterable[str] = CHECKS) -> Report:
    """Return the report of a plan that is not measured: no GPU is used, or the gate is off."""
    results: tuple[CheckResult, ...] = no_gpu(plan, tuple(names))
    verdict = Status.PASS
    if plan.uses_gpu:
        results, verdict = (_mode("off", "nothing was measured"),), Status.WARN
    return Report(plan=plan, facts=HostFacts(), checks=results, verdict=verdict, exit_code=OK)


def _mode(observed: str, means: str) -> CheckResult:
    """Return what a mode other than `enforce` is reported as."""
    return CheckResult(
        id="gate.mode",
        scope="host",
        status=Status.WARN,
        observed=observed,
        expected="enforce",
        message=f"gate.mode is {observed}: {means}",
        source="config",
        severity=Severity.SOFT,
    )


def _mode_note(context: Context) -> tuple[CheckResult, ...]:
    if context.policy.mode != "warn":
        return ()
    return (_mode("warn", "faults are reported and the engine starts all the same"),)
