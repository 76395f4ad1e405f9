"""Section `gate`: the hardware policy that decides whether the engine may start."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from appliance.config.base import Day, Duration, Section
from appliance.config.model import AbsolutePath

Bound = Annotated[float, Field(ge=0, le=1e12)]
PowerBudget = Annotated[float, Field(gt=0, le=1e6)]
Rate = Annotated[float, Field(gt=0, le=1000)]


class EccPolicy(Section):
    """Limits on memory errors and retired pages."""

    require_enabled: bool = Field(
        default=True, description="ECC must be on, now and after the next reboot."
    )
    retired_pages_fail: int = Field(
        default=60,
        ge=1,
        le=64,
        description="Retired pages at which a GPU is refused; the table holds 64.",
    )
    retired_pages_warn: int = Field(
        default=15, ge=1, le=64, description="Retired pages that are reported."
    )
    sbe_lifetime_warn: int = Field(
        default=100_000,
        ge=1,
        le=10**12,
        description="Corrected errors over the card's life that are reported.",
    )
    sbe_per_day_warn: int = Field(
        default=1_000, ge=1, le=10**12, description="Corrected errors a day that are reported."
    )


class P2pPolicy(Section):
    """How GPUs must reach each other."""

    policy: Literal["require", "auto", "off"] = Field(
        default="auto",
        description="`require` refuses a pair without peer access, `auto` starts without it and "
        "says so, `off` never uses it.",
    )
    functional_test: bool = Field(
        default=True, description="Copy and compare between the GPUs before the engine starts."
    )
    test_timeout: Duration = Field(
        default=15.0, ge=1.0, le=300.0, description="After this long a peer copy counts as hung."
    )
    test_bytes_mib: int = Field(
        default=64, ge=1, le=1024, description="MiB moved in each direction by the functional test."
    )


class PciePolicy(Section):
    """What each GPU's link must give; rates in GB/s of lanes times per-lane rate."""

    min_width: int = Field(
        default=8, ge=1, le=16, description="Lanes below which a link is degraded for this plan."
    )
    tensor_rate_fail: Rate = Field(
        default=7.5, description="GB/s below which tensor parallelism is refused without NVLink."
    )
    tensor_rate_warn: Rate = Field(
        default=15.0, description="GB/s below which tensor parallelism is reported as slow."
    )
    pipeline_rate_fail: Rate = Field(
        default=2.0, description="GB/s below which pipeline parallelism is refused."
    )
    rate_warn: Rate = Field(
        default=7.5, description="GB/s below which a link is reported for any plan."
    )


class ThermalPolicy(Section):
    """Temperatures in degrees Celsius."""

    gpu_warn_c: int = Field(
        default=83, ge=40, le=100, description="GPU temperature that is reported."
    )
    hbm_margin_warn_c: int = Field(
        default=7,
        ge=0,
        le=50,
        description="Distance of the memory to its own limit that is reported.",
    )
    slowdown_c: int = Field(
        default=87, ge=40, le=110, description="GPU temperature that counts as slowdown."
    )
    idle_warn_c: int = Field(
        default=75, ge=30, le=100, description="Temperature at idle power that is reported."
    )


class Override(Section):
    """One accepted deviation: it lapses when it expires or when the value passes its bound."""

    check: str = Field(min_length=1, description="Id of the check, as the gate's report spells it.")
    gpu: str = Field(min_length=1, description="UUID of the GPU.")
    reason: str = Field(min_length=8, description="Why this is acceptable; at least 8 characters.")
    by: str = Field(min_length=1, description="Who decided.")
    until: Day = Field(description="Last day, at most 30 days ahead.")
    bound: Bound = Field(description="The override holds while the observed value is at most this.")


class GateSection(Section):
    """The hardware policy that decides whether the engine may start."""

    mode: Literal["enforce", "warn", "off"] = Field(
        default="enforce",
        description="`warn` reports and starts all the same, `off` measures nothing; both are "
        "logged at WARNING.",
    )
    on_unknown: Literal["refuse", "allow"] = Field(
        default="refuse", description="What a hard check that could not be measured does."
    )
    timeout: Duration = Field(
        default=20.0,
        ge=1.0,
        le=300.0,
        description="Time for all reads of all GPUs; after it the gate is unknown.",
    )
    gpu_timeout: Duration = Field(
        default=5.0, ge=0.5, le=60.0, description="Time for the reads of one GPU."
    )
    expected_gpus: int | None = Field(
        default=None, ge=1, le=64, description="GPUs this host should have."
    )
    psu_budget_w: PowerBudget | None = Field(
        default=None,
        description="Watts that the power supply can give the plan's GPUs together; power limits "
        "that sum up to more are refused.",
    )
    ecc: EccPolicy = Field(
        default_factory=EccPolicy, description="Limits on memory errors and retired pages."
    )
    p2p: P2pPolicy = Field(default_factory=P2pPolicy, description="How GPUs must reach each other.")
    pcie: PciePolicy = Field(
        default_factory=PciePolicy, description="What each GPU's link must give."
    )
    thermal: ThermalPolicy = Field(
        default_factory=ThermalPolicy, description="Temperatures in degrees Celsius."
    )
    state_dir: AbsolutePath = Field(
        default="/var/lib/appliance",
        description="Directory that survives the container: baselines, latches, audit log.",
    )
    overrides: list[Override] = Field(
        default_factory=list, max_length=64, description="Accepted deviations."
    )
