"""`appliance gate`: judge the hardware for the plan, record it, acknowledge a fault."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.commands._planning import add_options, checkpoint_of, machine
from appliance.config.load import load_config
from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.gate.defaults import plain_section
from appliance.gate.gate import (
    GateReport,
    gate_of_host,
    gate_report,
    gate_without_plan,
    run_gate,
    simulated,
)
from appliance.gate.styles import STYLES, exit_status, table
from appliance.plan.planner import make_plan
from healthchecks.history import AckError
from healthchecks.nvml import NvmlUnavailable, read_host
from healthchecks.plan import GatePlan
from healthchecks.policy import policy_of
from healthchecks.runner import MIN_REASON, ack
from healthchecks.simulate import record_text
from healthchecks.state_file import StateUnavailableError

if TYPE_CHECKING:
    import argparse

    from appliance.config.load import LoadedConfig
    from healthchecks.facts import HostFacts

HELP = "judge the hardware for the plan"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb and of `ack`."""
    add_options(parser)
    parser.add_argument(
        "--simulate", type=Path, metavar="FILE", help="judge a recorded machine state"
    )
    parser.add_argument(
        "--as",
        dest="kind",
        choices=("single", "pp2", "tp2"),
        help="with --simulate: the plan's kind, in place of a configuration",
    )
    parser.add_argument(
        "--p2p", choices=("require", "auto", "off"), default="auto", help="gate.p2p.policy for --as"
    )
    parser.add_argument(
        "--strict-evidence",
        action="store_true",
        help="with --simulate: what a published record does not show is unknown, not healthy",
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="write this machine's state, without serials"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--exit-style", choices=STYLES, default="native", help="whose exit codes and form to use"
    )
    actions = parser.add_subparsers(dest="action", metavar="ack")
    one = actions.add_parser("ack", help="take note of a latched fault or of grown errors")
    one.add_argument("check", help="id of the check, as the report spells it")
    one.add_argument("--gpu", required=True, metavar="UUID", help="the GPU")
    one.add_argument("--by", required=True, help="who decides")
    one.add_argument("--reason", required=True, help=f"why, at least {MIN_REASON} letters")


def run(arguments: argparse.Namespace) -> int:
    """Judge, print the report, and return the verdict's exit code."""
    if arguments.action == "ack":
        return _acknowledge(arguments)
    report = _judge(arguments)
    if arguments.record is not None:
        _record(arguments.record, report)
    if arguments.json:
        sys.stdout.write(report.to_json())
    else:
        sys.stdout.write(table(report.report, arguments.exit_style))
    return exit_status(report.report, arguments.exit_style)


def _judge(arguments: argparse.Namespace) -> GateReport:
    if arguments.kind is not None:
        if arguments.simulate is None:
            raise _usage("--as", "--simulate FILE beside it", "none")
        section = plain_section()
        gate = {**section, "p2p": {**section["p2p"], "policy": arguments.p2p}}
        plan = GatePlan(kind=arguments.kind, uuids=(), policy=policy_of(gate))
        return gate_report(simulated(arguments.simulate, plan, strict=arguments.strict_evidence))
    loaded = load_config(arguments.config)
    try:
        host = _host(loaded, arguments)
    except NvmlUnavailable as error:
        return gate_without_plan(loaded.config.gate, error)
    try:
        launch = make_plan(loaded, checkpoint_of(loaded, arguments.model), host)
    except ApplianceError:
        # A GPU that hangs or is lost has no size to plan with; the gate says so in its own words.
        report = gate_of_host(loaded.config.gate, host)
        if report is None:
            raise
        return report
    return run_gate(
        launch,
        simulate=arguments.simulate,
        strict=arguments.strict_evidence,
        keep_hold=False,
        wait_free_s=0.0,
    )


def _host(loaded: LoadedConfig, arguments: argparse.Namespace) -> HostFacts:
    """Return the machine to plan for: the assumed one, none for the CPU engine, or this one."""
    assumed: HostFacts | None = arguments.assume
    if assumed is not None or loaded.config.execution.device == "cpu":
        return machine(loaded, assumed)
    gate = loaded.config.gate
    return read_host(timeout_s=gate.timeout, gpu_timeout_s=gate.gpu_timeout)


def _record(path: Path, report: GateReport) -> None:
    try:
        path.write_text(record_text(report.report.facts, report.report.plan), encoding="utf-8")
    except OSError as error:
        raise _usage(
            "--record", "a file that can be written", f"{path}: {error.strerror}"
        ) from error


def _acknowledge(arguments: argparse.Namespace) -> int:
    if len(arguments.reason.strip()) < MIN_REASON:
        raise _usage("--reason", f"at least {MIN_REASON} letters", repr(arguments.reason))
    folder = Path(load_config(arguments.config).config.gate.state_dir)
    try:
        ack(folder, arguments.check, arguments.gpu, by=arguments.by, reason=arguments.reason)
    except (AckError, StateUnavailableError) as error:
        fault = Fault(
            "GATE_ACK",
            str(folder),
            "a fault that waits for an acknowledgement",
            str(error),
            "see `appliance gate` for the checks that refuse",
        )
        raise ApplianceError(ExitCode.USAGE, fault) from error
    sys.stdout.write(json.dumps({"acknowledged": arguments.check, "gpu": arguments.gpu}) + "\n")
    return ExitCode.OK


def _usage(where: str, what: str, value: str) -> ApplianceError:
    fix = "see `appliance gate --help`"
    return ApplianceError(ExitCode.USAGE, Fault("GATE_USAGE", where, what, value, fix))
