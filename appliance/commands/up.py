"""`appliance up`: render what Compose must know, then start gate and engine and wait for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from appliance.commands._compose import ended_service, refusal, run_compose, verify_versions
from appliance.commands._planning import DEFAULT_CONFIG, add_options, checkpoint_of, machine
from appliance.config.load import load_config
from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.plan.planner import make_plan
from appliance.render.compose import FILE_NAME, adds_nothing, compose_override
from appliance.render.generated import MARK, write_generated

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from appliance.config.load import LoadedConfig
    from appliance.plan.launch_plan import LaunchPlan

HELP = "start the containers that the configuration asks for, and wait until they serve"

CONFIG_NAME = "appliance.yaml"
"""Name of the file in the directory that is mounted; compose.yaml names it."""

MODELS = PurePosixPath("/models")
"""Where the models' directory is mounted."""

KEYS_SECRET = "/run/secrets/api_keys"  # noqa: S105 - where compose.keys.yaml mounts it
LOG_LINES = 40


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_options(parser)
    parser.set_defaults(config=DEFAULT_CONFIG)
    parser.add_argument(
        "--models",
        type=Path,
        metavar="DIR",
        help="directory of this host that is mounted as /models (default: as compose.yaml says)",
    )
    parser.add_argument(
        "--project",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where compose.yaml lies (default: the working directory)",
    )
    parser.add_argument(
        "--render-only", action="store_true", help=f"write {FILE_NAME} and start nothing"
    )


def run(arguments: argparse.Namespace) -> int:
    """Render, start, wait; return 0 once the engine is healthy.

    Raises:
        ApplianceError: With the code of the first of configuration, plan, container engine, gate
            and engine that refuses.
    """
    folder: Path = arguments.project.resolve()
    loaded = load_config(arguments.config)
    _verify_layout(folder, arguments.config, loaded)
    plan = _plan(loaded, arguments, folder)
    override = folder / FILE_NAME
    _render(override, compose_override(plan, loaded.config))
    if arguments.render_only:
        return ExitCode.OK
    environment = {**os.environ, "APPLIANCE_CONFIG_DIR": str(arguments.config.resolve().parent)}
    if arguments.models is not None:
        environment["APPLIANCE_MODELS_DIR"] = str(arguments.models.resolve())
    verify_versions(environment)
    files = [word for name in compose_files(plan, folder) for word in ("--file", name)]
    patience = str(int(plan.run.startup_timeout_s) + 60)
    up = (*files, "up", "--detach", "--wait", "--wait-timeout", patience)
    said = run_compose(up, folder=folder, environment=environment)
    if said is None:
        sys.stdout.write(f"http://{plan.server.host}:{plan.server.port}/v1\n")
        return ExitCode.OK
    ended = ended_service(said)
    if ended is None:
        raise refusal(said)
    return _explain(ended, files, folder, environment)


def compose_files(plan: LaunchPlan, folder: Path) -> tuple[str, ...]:
    """Return the Compose files of a plan, in the order in which they are merged."""
    names = ["compose.yaml"]
    if plan.execution.device == "cpu":
        names.append("compose.cpu.yaml")
    if plan.server.api_keys_file == KEYS_SECRET:
        names.append("compose.keys.yaml")
    if (folder / FILE_NAME).exists():
        names.append(FILE_NAME)
    return tuple(names)


def host_model(path: str, models: Path) -> Path:
    """Return where the checkpoint of `model.path` lies on this host.

    Args:
        path: `model.path`, as the container sees it.
        models: Directory of this host that is mounted as /models.

    Raises:
        ApplianceError: Exit 10, if the path is not below /models.
    """
    try:
        return models / PurePosixPath(path).relative_to(MODELS)
    except ValueError:
        what, fix = "must lie below /models, which is what gets mounted", "write /models/NAME"
        raise ApplianceError(
            ExitCode.CONFIG, Fault("MODEL_NOT_MOUNTED", "model.path", what, path, fix)
        ) from None


def _plan(loaded: LoadedConfig, arguments: argparse.Namespace, folder: Path) -> LaunchPlan:
    model: Path | None = arguments.model
    if model is None:
        model = host_model(loaded.config.model.path, _models(loaded, arguments, folder))
    return make_plan(loaded, checkpoint_of(loaded, model), machine(loaded, arguments.assume))


def _models(loaded: LoadedConfig, arguments: argparse.Namespace, folder: Path) -> Path:
    """Return the directory that gets mounted: told, or what the Compose files default to."""
    if arguments.models is not None:
        return Path(arguments.models)
    default = folder / ".demo" if loaded.config.execution.device == "cpu" else Path(MODELS)
    return Path(os.environ.get("APPLIANCE_MODELS_DIR", default))


def _verify_layout(folder: Path, config: Path, loaded: LoadedConfig) -> None:
    if not (folder / "compose.yaml").is_file():
        what, fix = "must hold compose.yaml", "run it where the appliance was cloned, or --project"
        raise ApplianceError(
            ExitCode.USAGE, Fault("NO_COMPOSE_FILE", str(folder), what, "none", fix)
        )
    if config.name != CONFIG_NAME:
        what, fix = f"must be named {CONFIG_NAME}, since its directory is mounted", "rename it"
        raise ApplianceError(
            ExitCode.USAGE, Fault("CONFIG_NAME", str(loaded.path), what, config.name, fix)
        )


def _render(override: Path, text: str) -> None:
    """Write the override, or take an older one of ours away if there is nothing to override."""
    if not adds_nothing(text):
        write_generated(override, text)
    elif override.is_file() and override.read_text(encoding="utf-8").startswith(MARK):
        override.unlink()


def _explain(
    ended: tuple[str, int], files: Sequence[str], folder: Path, environment: dict[str, str]
) -> int:
    """Show the last lines of the container that ended, and pass its exit code on."""
    service, code = ended
    logs = ("docker", "compose", *files, "logs", "--no-log-prefix", "--tail", str(LOG_LINES))
    done = subprocess.run(
        (*logs, service), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    sys.stderr.write(f"{done.stdout}{service} ended in {code}; the engine does not serve.\n")
    return code or ExitCode.ENGINE_DIED
