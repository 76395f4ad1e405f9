"""LaunchPlan to compose.override.yaml: what of the plan a running container cannot change itself.

compose.yaml is complete for the default configuration, so that a clean clone needs no rendering.
The override holds only the differences, and a label with the configuration's digest, by which an
edited file recreates the container.
"""

from __future__ import annotations

import math
from ipaddress import ip_address
from typing import TYPE_CHECKING

from appliance.config.schema import Config
from appliance.render.generated import header
from appliance.render.templating import fill
from appliance.units import GIB

if TYPE_CHECKING:
    from appliance.plan.launch_plan import LaunchPlan

ENGINE = "engine"
GATE = "gate"
"""Services of compose.yaml; never `vllm`, whose variables would reach the engine."""

FILE_NAME = "compose.override.yaml"
NOTHING = "services: {}"
DEFAULT_MODEL_PATH = "/models/quasar"

BASE_SHM_BYTES = 16 * GIB
BASE_PORTS = ("127.0.0.1:8000:8000", "127.0.0.1:9400:9400")
BASE_GRACE_S = 90
BASE_START_PERIOD_S = 1800
"""What compose.yaml says by itself."""

GRACE_MARGIN_S = 30
"""After the drain the engine still has to be ended, at most this long."""


def compose_override(plan: LaunchPlan, config: Config) -> str:
    """Return the text of compose.override.yaml.

    Args:
        plan: What to launch.
        config: The configuration behind it; how GPUs were named decides what is reserved.
    """
    ports, grace = published_ports(plan), grace_period_s(plan)
    start_period = math.ceil(plan.run.startup_timeout_s)
    values: dict[str, object] = {
        "label": None if config == default_config() else plan.config_sha256,
        "shm": None if plan.memory.shm_bytes == BASE_SHM_BYTES else plan.memory.shm_bytes,
        "ports": None if ports == BASE_PORTS else ports,
        "grace": None if grace == BASE_GRACE_S else grace,
        "start_period": None if start_period == BASE_START_PERIOD_S else start_period,
        "cpu": plan.execution.device == "cpu",
        "gpus": reserved_gpus(config),
    }
    return fill(
        f"{FILE_NAME}.j2",
        header=header(plan.config_sha256),
        engine=ENGINE,
        gate=GATE,
        nothing=None if any(values.values()) else NOTHING,
        **values,
    )


def adds_nothing(text: str) -> bool:
    """Tell whether a rendered override changes nothing, so that it may as well be absent."""
    return text.endswith(f"{NOTHING}\n")


def default_config() -> Config:
    """Return the configuration that compose.yaml serves without an override."""
    return Config.model_validate({"version": 1, "model": {"path": DEFAULT_MODEL_PATH}})


def published_ports(plan: LaunchPlan) -> tuple[str, ...]:
    """Return API and admin port as Compose publishes them, each on its configured address."""
    server = plan.server
    return (
        _published(server.host, server.port),
        _published(server.admin_host, server.admin_port),
    )


def grace_period_s(plan: LaunchPlan) -> int:
    """Return how long an orchestrator waits between its stop signal and its kill, seconds."""
    return math.ceil(plan.server.drain_timeout_s) + GRACE_MARGIN_S


def reserved_gpus(config: Config) -> str | tuple[str, ...] | None:
    """Return the reservation: UUIDs, `all`, or None for what compose.yaml says.

    UUIDs mean the same inside and outside. Indexes do not: a container with fewer GPUs counts them
    anew, so it gets all of them and the plan inside picks.
    """
    gpus = config.parallel.gpus
    if isinstance(gpus, str):
        return None
    uuids = tuple(gpu for gpu in gpus if isinstance(gpu, str))
    return uuids or "all"


def _published(host: str, port: int) -> str:
    address = "127.0.0.1" if host == "localhost" else host
    if ip_address(address).version == 6:  # noqa: PLR2004 - the version of the protocol
        address = f"[{address}]"
    return f"{address}:{port}:{port}"
