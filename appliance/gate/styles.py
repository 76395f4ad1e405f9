"""The report for people, and the exit codes of the programs that may call the gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.result import Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from healthchecks.report import Report
    from healthchecks.result import CheckResult

STYLES = ("native", "docker", "nagios", "npd")
NPD_WIDTH = 80
"""Node-problem-detector cuts a plugin's line there."""

_CODES: Mapping[str, Mapping[Status, int]] = {
    "docker": {Status.PASS: 0, Status.WARN: 0, Status.FAIL: 1, Status.UNKNOWN: 1},
    "nagios": {Status.PASS: 0, Status.WARN: 1, Status.FAIL: 2, Status.UNKNOWN: 3},
    "npd": {Status.PASS: 0, Status.WARN: 0, Status.FAIL: 1, Status.UNKNOWN: 2},
}


def exit_status(report: Report, style: str) -> int:
    """Return the exit code of a report in one style; `native` is that of docs/operations.md."""
    return report.exit_code if style == "native" else _CODES[style][report.verdict]


def table(report: Report, style: str = "native") -> str:
    """Return the report as text; the styles of other programs get one line."""
    if style == "npd":
        return f"{headline(report)[:NPD_WIDTH]}\n"
    if style in ("docker", "nagios"):
        return f"{headline(report)}\n"
    counts = {
        status: sum(1 for item in report.checks if item.status is status) for status in Status
    }
    lines = [f"{headline(report)}", ""]
    for result in report.worst():
        lines += _rows(result)
    lines += [f"  launch    {reason}" for reason in report.launch.reasons]
    if report.launch.suggested_plan:
        lines.append(f"  suggest   plan {report.launch.suggested_plan} would start on this machine")
    summary = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    lines += [f"  checks    {summary}", *_skipped(report)]
    return "\n".join(lines) + "\n"


def headline(report: Report) -> str:
    """Return the verdict and its first reason in one line."""
    worst = report.worst()
    reason = f": {worst[0].id}: {worst[0].message}" if worst else ""
    return f"gate {report.verdict.value.upper()} for {report.plan.kind}{reason}"


def _rows(result: CheckResult) -> list[str]:
    rows = [f"  {result.status.value.upper():<9} {result.id:<20} {result.message}"]
    if result.overridden_by:
        rows.append(f"{'':32} accepted by {result.overridden_by}")
    if result.remedy:
        rows.append(f"{'':32} -> {result.remedy}")
    return rows


def _skipped(report: Report) -> list[str]:
    reasons = {item.message for item in report.checks if item.status is Status.SKIPPED}
    return [f"  {reason}" for reason in sorted(reasons)] if len(reasons) == 1 else []
