"""What the verbs that plan share: their options, the machine they plan for, and the plan itself."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.checkpoint.read import summarize
from appliance.checkpoint.rules import Lenient
from appliance.config.load import LoadedConfig, load_config
from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.plan.host import cpu_host
from appliance.plan.planner import make_plan
from healthchecks.assumed import assumed_host
from healthchecks.nvml import NvmlUnavailable, read_host

if TYPE_CHECKING:
    from appliance.checkpoint.summary import CheckpointSummary
    from appliance.plan.launch_plan import LaunchPlan
    from healthchecks.facts import HostFacts

DEFAULT_CONFIG = Path("config/appliance.yaml")
_PLAN_FIX = "name the GPUs to plan for, as in --assume 2x16GiB"
_SERVE_FIX = (
    "load the NVIDIA driver on the host and give the container the GPUs by the NVIDIA container "
    "toolkit, or set execution.device: cpu"
)


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made of."""

    loaded: LoadedConfig
    checkpoint: CheckpointSummary
    plan: LaunchPlan


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--config`, `--model` and `--assume`."""
    parser.add_argument(
        "--config",
        type=Path,
        default=DEFAULT_CONFIG,
        metavar="FILE",
        help=f"the configuration file (default: {DEFAULT_CONFIG})",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="where the checkpoint lies here, if not at model.path",
    )
    parser.add_argument(
        "--assume",
        type=_assumed,
        metavar="GPUS",
        help="plan for GPUs that are not here, such as 2x16GiB or 2x32GiB-nvlink",
    )


def planned(arguments: argparse.Namespace) -> Planned:
    """Return the plan for the options of `add_options`.

    Raises:
        ApplianceError: With the exit code of the first of configuration, checkpoint, GPUs and fit
            that fails.
    """
    loaded = load_config(arguments.config)
    checkpoint = checkpoint_of(loaded, arguments.model)
    host = machine(loaded, arguments.assume)
    return Planned(loaded, checkpoint, make_plan(loaded, checkpoint, host))


def checkpoint_of(loaded: LoadedConfig, model: Path | None) -> CheckpointSummary:
    """Return the summary of the checkpoint at `model`, or where the configuration says it is.

    Raises:
        ApplianceError: Exit 30 or 31.
    """
    section = loaded.config.model
    path = Path(section.path) if model is None else model
    try:
        return summarize(path, Lenient(section.lenient))
    except ApplianceError as error:
        told = (_at_key(fault, loaded, path, named=model is None) for fault in error.faults)
        raise ApplianceError(error.exit_code, *told) from None


def _at_key(fault: Fault, loaded: LoadedConfig, path: Path, *, named: bool) -> Fault:
    """Return a fault of the path as a whole as one of `model.path`, where that names it."""
    if fault.code not in {"E_PATH", "E_UNREADABLE"} or fault.where != str(path):
        return fault
    what = f"must be {fault.what}"
    if not named:
        return replace(fault, what=what)
    value = f"{fault.value.removesuffix(' there')} at {path}"
    return replace(fault, where=loaded.where("model.path"), what=what, value=value)


def check_template(loaded: LoadedConfig, checkpoint: CheckpointSummary) -> None:
    """Render a conversation through the chat template that would be served.

    Raises:
        ApplianceError: E_CHAT_TEMPLATE (exit 30) if it cannot be used.
    """
    stated = loaded.config.model.chat_template
    if loaded.config.server.api != "all" or not (stated or checkpoint.has_chat_template):
        return
    from appliance.checkpoint.smoke import try_part  # noqa: PLC0415 - jinja2, which no plan needs

    file = None if stated is None else Path(stated)
    fault = try_part("template", checkpoint.path, 0, file=file).fault
    if fault is not None:
        raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)


def machine(
    loaded: LoadedConfig, assumed: HostFacts | None, *, to_serve: bool = False
) -> HostFacts:
    """Return the facts of this machine, or the assumed ones; the CPU engine needs no GPU.

    Args:
        loaded: The configuration.
        assumed: GPUs that are not here; the CPU engine, which uses none, says so and goes on.
        to_serve: The plan is served here, so that no assumed GPU would help.

    Raises:
        ApplianceError: Exit 11, if a GPU is needed and NVML does not answer.
    """
    if loaded.config.execution.device == "cpu":
        if assumed is not None:
            where = loaded.where("execution.device")
            sys.stderr.write(
                f"warning {where}: cpu uses no GPU, so that --assume changes nothing\n"
            )
        return cpu_host()
    if assumed is not None:
        return assumed
    gate = loaded.config.gate
    try:
        return read_host(timeout_s=gate.timeout, gpu_timeout_s=gate.gpu_timeout)
    except NvmlUnavailable as error:
        what, fix = "must have readable GPUs", _SERVE_FIX if to_serve else _PLAN_FIX
        fault = Fault("NO_GPU", "this machine", what, str(error), fix)
        late = error.kind == "timeout"  # nothing was measured, which is not the same as no GPU
        code = ExitCode.GATE_UNKNOWN if late else ExitCode.NO_GPU
        raise ApplianceError(code, fault) from None


def _assumed(text: str) -> HostFacts:
    """Return the facts of `--assume`; argparse turns its own error into a usage line."""
    try:
        return assumed_host(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {error}, got {text!r}") from None
