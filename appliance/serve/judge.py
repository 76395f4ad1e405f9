"""The gate's report as the supervisor needs it: start or not, and the one message if not."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.checkpoint.manifest import verify_manifest
from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.gate.gate import GateReport, run_gate
from appliance.plan.adjustments import NO_ADJUSTMENTS
from appliance.serve.outside import GateOutcome
from appliance.serve.prerequisites import missing_prerequisite
from appliance.units import GIB
from healthchecks.result import Status

if TYPE_CHECKING:
    from appliance.plan.launch_plan import LaunchPlan
    from appliance.serve.events import EventLog
    from healthchecks.result import CheckResult

_CODES = {
    ExitCode.NO_GPU: "GATE_NO_GPU",
    ExitCode.CONTAINER: "GATE_CONTAINER",
    ExitCode.GATE_FAILED: "GATE_FAILED",
    ExitCode.GATE_UNKNOWN: "GATE_UNKNOWN",
}
_LEVELS = {Status.FAIL: "error", Status.UNKNOWN: "warning", Status.WARN: "warning"}


def judge_machine(plan: LaunchPlan, log: EventLog) -> GateOutcome:
    """Run the gate, log what is not healthy, and return whether the engine may start."""
    try:
        report = run_gate(plan)
    except ApplianceError as error:
        return GateOutcome(error.exit_code, error.faults[0], NO_ADJUSTMENTS, {})
    starts = report.exit_code is ExitCode.OK
    for result in report.report.worst():
        log.emit(
            "warning" if starts else _LEVELS[result.status],
            "gate.check",
            {
                "status": result.status.value,
                "id": result.id,
                "scope": result.scope,
                "message": result.message,
                "remedy": result.remedy,
            },
        )
    log.info("gate.verdict", verdict=report.verdict, exit_code=int(report.exit_code))
    return outcome_of(report)


def judge_start(plan: LaunchPlan, log: EventLog) -> GateOutcome:
    """Judge the machine, what the engine needs of it, and the files if their digests are asked."""
    outcome = judge_machine(plan, log)
    if outcome.fault is not None:
        return outcome
    fault = missing_prerequisite(plan, os.environ, log)
    if fault is not None:
        return replace(outcome, exit_code=ExitCode.CONTAINER, fault=fault)
    if plan.model.integrity != "sha256":
        return outcome
    began = time.monotonic()
    log.info("checkpoint.verify", path=plan.model.path)
    try:
        size = verify_manifest(Path(plan.model.path))
    except ApplianceError as error:
        for fault in error.faults[1:]:
            log.emit("error", "checkpoint.fault", {"fault": str(fault)})
        return replace(outcome, exit_code=error.exit_code, fault=error.faults[0])
    seconds = round(time.monotonic() - began, 1)
    log.info("checkpoint.verified", gib=round(size / GIB, 2), seconds=seconds)
    return outcome


def outcome_of(report: GateReport) -> GateOutcome:
    """Return what a report means for a start."""
    plain = json.loads(report.to_json())
    code = report.exit_code
    fault = None if code is ExitCode.OK else refusal_fault(code, report.report.worst())
    return GateOutcome(code, fault, report.adjustments, plain)


def refusal_fault(code: ExitCode, worst: tuple[CheckResult, ...]) -> Fault:
    """Return the one message of a refusal: the first check that refuses, and how many more."""
    refusing = [result for result in worst if result.status in {Status.FAIL, Status.UNKNOWN}]
    name = _CODES.get(code, "GATE_FAILED")
    if not refusing:
        what, fix = "must let the engine start", "run `appliance gate --json`"
        return Fault(name, "gate", what, f"exit code {int(code)} without a failed check", fix)
    first, more = refusing[0], len(refusing) - 1
    value = first.observed or first.message
    if more:
        value += f", and {more} more (`appliance gate`)"
    what = f"must be {first.expected}" if first.expected else first.message
    fix = (first.remedy or "run `appliance gate` for the whole report").rstrip(".")
    return Fault(name, f"{first.scope} {first.id}", what, value, fix)
