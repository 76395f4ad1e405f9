"""Section `runtime`: what is watched while it serves."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from appliance.config.base import Duration, Section


class RuntimeThermal(Section):
    """Sampling and hysteresis of temperatures while serving."""

    sample_interval: Duration = Field(
        default=15.0, ge=1.0, le=300.0, description="Time between two samples of every GPU."
    )
    leave_gpu_c: int = Field(
        default=80,
        ge=30,
        le=100,
        description="Degrees Celsius below which a warm GPU counts as cool again.",
    )
    leave_hbm_margin_c: int = Field(
        default=10,
        ge=0,
        le=60,
        description="Distance to the memory's limit, in degrees, above which it counts as cool "
        "again.",
    )


class RestartBudget(Section):
    """How often the engine may be brought up again inside one container."""

    count: int = Field(default=3, ge=0, le=100, description="Restarts allowed.")
    per: Duration = Field(
        default=3600.0, ge=1.0, le=604_800.0, description="Span in which they are counted."
    )


class RuntimeSection(Section):
    """What is watched while it serves."""

    on_gpu_fault: Literal["drain_exit", "exit", "report"] = Field(
        default="drain_exit",
        description="Answer to a hard hardware fault while serving: let requests end and stop, "
        "stop at once, or only report.",
    )
    stall: Duration = Field(
        default=120.0,
        ge=1.0,
        le=3600.0,
        description="Time without progress, with requests waiting, after which the engine is "
        "stalled.",
    )
    thermal: RuntimeThermal = Field(
        default_factory=RuntimeThermal,
        description="Sampling and hysteresis of temperatures while serving.",
    )
    restart_budget: RestartBudget = Field(
        default_factory=RestartBudget,
        description="How often the engine may be brought up again inside one container.",
    )
