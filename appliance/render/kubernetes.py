"""LaunchPlan to a Kubernetes patch: probes, grace period, shared memory, GPUs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from appliance.config.rules import is_loopback
from appliance.render.compose import ENGINE, grace_period_s
from appliance.render.generated import header
from appliance.render.templating import fill

if TYPE_CHECKING:
    from appliance.plan.launch_plan import LaunchPlan

NAME = "nvfp4-appliance"
"""Never `vllm`: a service of that name injects VLLM_PORT into every pod beside it."""

PERIOD_S = 10
PROBE_TIMEOUT_S = 10
FAILURES = 3
"""A probe that is slow is not a server that is dead: ten seconds, three times in a row."""


def kubernetes_patch(plan: LaunchPlan) -> str:
    """Return a strategic-merge patch for the Deployment that runs the appliance.

    Args:
        plan: What to launch.
    """
    budget = math.ceil(plan.run.startup_timeout_s / PERIOD_S)
    usual = {"period": PERIOD_S, "failures": FAILURES}
    return fill(
        "kubernetes.yaml.j2",
        header=header(plan.config_sha256),
        name=NAME,
        container=ENGINE,
        sha256=plan.config_sha256,
        grace=grace_period_s(plan),
        port=plan.server.port,
        admin_port=plan.server.admin_port,
        admin_published=not is_loopback(plan.server.admin_host),
        gpus=len(plan.parallel.gpus) if plan.execution.device == "cuda" else 0,
        startup={"period": PERIOD_S, "failures": max(FAILURES, budget)},
        live=usual,
        ready=usual,
        probe_timeout=PROBE_TIMEOUT_S,
        shm=plan.memory.shm_bytes,
    )
