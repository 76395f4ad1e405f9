"""`appliance validate`: is the file right, is the checkpoint whole, does the model fit."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from appliance.checkpoint.read import summarize
from appliance.commands._planning import add_options, check_template, checkpoint_of, machine
from appliance.config.load import load_config
from appliance.errors import ApplianceError, ExitCode
from appliance.plan.planner import check_without_cards, make_plan
from appliance.units import format_bytes

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from appliance.checkpoint.summary import CheckpointSummary
    from appliance.config.load import LoadedConfig
    from appliance.plan.launch_plan import LaunchPlan

HELP = "check the configuration file and the checkpoint it names"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_options(parser)
    parser.add_argument(
        "--schema-only",
        action="store_true",
        help="check the file alone; the checkpoint is elsewhere",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Check, report and return 0.

    Raises:
        ApplianceError: With the exit code of what is wrong and every fault of it.
    """
    loaded = _load(arguments.config, None if arguments.schema_only else arguments.model)
    checkpoint = None if arguments.schema_only else checkpoint_of(loaded, arguments.model)
    plan, skipped = None, "only the file was asked for"
    if checkpoint is not None:
        check_template(loaded, checkpoint)
        plan, skipped = _plan(loaded, checkpoint, arguments)
    warnings = _warnings(loaded, checkpoint, plan)
    for warning in warnings:
        sys.stderr.write(f"warning {warning}\n")
    if arguments.json:
        report = _as_json(loaded, checkpoint, plan, warnings=warnings, skipped=skipped)
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        sys.stdout.write(_for_people(loaded, checkpoint, plan, skipped=skipped))
    return ExitCode.OK


def _load(config: Path, model: Path | None) -> LoadedConfig:
    """Return the configuration; where it is invalid, a checkpoint that was named is judged too."""
    try:
        return load_config(config)
    except ApplianceError as error:
        if model is None:
            raise
        try:
            summarize(model)
        except ApplianceError as other:
            raise ApplianceError(error.exit_code, *error.faults, *other.faults) from None
        raise


def _plan(
    loaded: LoadedConfig, checkpoint: CheckpointSummary, arguments: argparse.Namespace
) -> tuple[LaunchPlan | None, str]:
    """Return the plan, or none and why; without GPUs all is checked that needs none."""
    try:
        host = machine(loaded, arguments.assume)
    except ApplianceError as error:
        check_without_cards(loaded, checkpoint)
        return None, f"{error.faults[0].value}; name the GPUs to plan for by --assume 2x16GiB"
    return make_plan(loaded, checkpoint, host), ""


def _warnings(
    loaded: LoadedConfig, checkpoint: CheckpointSummary | None, plan: LaunchPlan | None
) -> tuple[str, ...]:
    """Return every warning once; those of a plan hold the others already."""
    notes = checkpoint.notes if checkpoint else ()
    found = [*loaded.warnings, *(note for note in notes if note.startswith("W_"))]
    return tuple(dict.fromkeys([*found, *(plan.warnings if plan else ())]))


def _for_people(
    loaded: LoadedConfig,
    checkpoint: CheckpointSummary | None,
    plan: LaunchPlan | None,
    *,
    skipped: str,
) -> str:
    lines = [f"configuration  {loaded.path}: valid, sha256 {loaded.sha256[:12]}"]
    if checkpoint is not None:
        size = format_bytes(sum(checkpoint.files.values()))
        lines.append(
            f"checkpoint     {checkpoint.path}: {checkpoint.geometry.architecture}, "
            f"{checkpoint.format} ({checkpoint.producer}), {size} in {len(checkpoint.files)} files"
        )
    if plan is not None:
        lines.append(
            f"plan           {plan.parallel.kind}, {plan.parallel.ranks} ranks on "
            f"{plan.execution.device}: {plan.model.max_model_len} tokens a request, "
            f"{plan.memory.kv_capacity_tokens} tokens of KV cache"
        )
    else:
        lines.append(f"plan           not made: {skipped}")
    return "\n".join(lines) + "\n"


def _as_json(
    loaded: LoadedConfig,
    checkpoint: CheckpointSummary | None,
    plan: LaunchPlan | None,
    *,
    warnings: tuple[str, ...],
    skipped: str,
) -> dict[str, object]:
    found: dict[str, object] | None = None
    if checkpoint is not None:
        found = {
            "path": str(checkpoint.path),
            "architecture": checkpoint.geometry.architecture,
            "format": checkpoint.format,
            "producer": checkpoint.producer,
            "bytes": sum(checkpoint.files.values()),
            "files": len(checkpoint.files),
            "tensors": checkpoint.tensor_count,
            "notes": list(checkpoint.notes),
        }
    return {
        "exit_code": int(ExitCode.OK),
        "config": {"path": str(loaded.path), "sha256": loaded.sha256},
        "checkpoint": found,
        "plan": None if plan is None else json.loads(plan.to_json()),
        "skipped": skipped,
        "warnings": list(warnings),
    }
