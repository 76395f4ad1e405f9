"""Says once, when a model is built, what each operation of this engine runs on."""

from __future__ import annotations

import logging

from appliance.vllm_plugin import engine_ops
from appliance.vllm_plugin.device import GPU_LIBRARY
from appliance.vllm_plugin.route import WeightRoute

_LOG = logging.getLogger("vllm.nvfp4")


def rows(route: WeightRoute) -> tuple[tuple[str, str], ...]:
    """Return what each operation of a GPU engine runs on, by its name."""
    product = GPU_LIBRARY if route is WeightRoute.FUSED else "torch, on decoded weights"
    return (
        ("nvfp4.linear", product),
        ("nvfp4.experts", product),
        ("nvfp4.experts_of_8_or_16_bits", "torch, on decoded weights"),
        *((f"nvfp4.{name}", GPU_LIBRARY) for name in ("gdn_conv", "gdn_core", "gdn_norm")),
        *engine_ops.table(),
    )


def report(device: str, route: WeightRoute) -> None:
    """Log the table of a GPU engine; the CPU engine has its own extension."""
    if device == "cuda":
        for name, runs_on in rows(route):
            _LOG.info("nvfp4.op name=%s runs_on=%s", name, runs_on.replace(" ", "_"))
