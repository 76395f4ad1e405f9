"""The gate's thresholds: those of the plan's section `gate`, and those that are fixed.

The defaults of the first kind are stated in the configuration's schema and nowhere else; a plan
always carries
them all. The second kind is below, each with where its number comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPUTE_CAPABILITY = (7, 0)
"""Volta; every kernel here is built for it."""

DRIVER_MIN = (450, 80, 2)
"""Oldest driver that runs CUDA 11.8 code by minor-version compatibility (CUDA release notes)."""

DRIVER_COMFORT = (520, 61, 5)
"""Driver that ships with CUDA 11.8; older ones work by compatibility only."""

DBE_PAGES_GROWTH = 15
"""Pages retired for double-bit errors above which growth within a week refuses (DCGM)."""

DBE_GROWTH_DAYS = 7.0
"""Span of that growth."""

REPLAYS_PER_MIN_PER_LANE = 0.48
"""Replays a minute and lane of a Gen3 link at a bit error rate of 1e-12 (DCGM health watch)."""

CORRECTED_DURING_LOAD = 10
"""Corrected PCIe errors or replays during one copy test that are reported."""

GB_S_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938}
"""PCIe rate a lane and direction by generation, after line coding (PCIe base specification)."""

BUSY_PERCENT = 50
"""Utilization from which a link reading counts as one under load."""

VOLTA_GENERATION = 3
"""The newest generation a V100 trains to."""

IDLE_POWER_W = 70.0
"""Draw below which a V100 counts as idle."""

SIBLING_POWER_SHARE = 0.6
"""Share of its siblings' power limit below which a GPU slows the others down."""

NVLINK_CRC_PER_S = 100.0
"""CRC errors a second on a lane that refuse (DCGM health watch)."""

HOST_MEMORY_MARGIN_BYTES = 4 * 1024**3
"""Host memory that loading needs beside one shard a rank."""

OVERRIDE_DAYS = 30
"""How far ahead an override may reach."""

SPIN_UTILIZATION, SPIN_POWER_W, SPIN_S = 100, 60.0, 60.0
"""Busy and cold for that long without a token: the mark of a collective that spins."""

FATAL_XIDS = frozenset({48, 62, 64, 79, 94, 95})
"""Errors after which the GPU cannot be trusted (NVIDIA Xid catalogue).

DBE, micro-controller halt, failed retirement, off the bus, and two that only newer parts know.
"""

NVLINK_XID = 74
WARN_XIDS = frozenset({32, 38, 56, 57, 58, 63, 68, 69, 92, 93})
"""Errors that are reported and let it start."""


@dataclass(frozen=True)
class Override:
    """One accepted deviation: a check on a GPU, until a day and up to a bound."""

    check: str
    gpu: str
    reason: str
    by: str
    until: date
    bound: float


@dataclass(frozen=True)
class Policy:
    """Section `gate` of a plan; degrees Celsius, GB/s, seconds."""

    mode: str
    on_unknown: str
    timeout_s: float
    gpu_timeout_s: float
    expected_gpus: int | None
    psu_budget_w: float | None
    require_ecc: bool
    retired_pages_fail: int
    retired_pages_warn: int
    sbe_lifetime_warn: int
    sbe_per_day_warn: int
    p2p: str
    functional_test: bool
    test_timeout_s: float
    test_bytes: int
    min_width: int
    tensor_rate_fail: float
    tensor_rate_warn: float
    pipeline_rate_fail: float
    rate_warn: float
    gpu_warn_c: int
    hbm_margin_warn_c: int
    slowdown_c: int
    idle_warn_c: int
    state_dir: str
    overrides: tuple[Override, ...]


class PolicyError(ValueError):
    """The plan's section `gate` lacks a key or holds a value of the wrong kind."""


def policy_of(gate: Mapping[str, Any]) -> Policy:
    """Read the section `gate` of a plan.

    Raises:
        PolicyError: If a key is absent or has the wrong kind; the message names it.
    """
    take = _Taker(gate)
    ecc, p2p, pcie, thermal = (take.section(name) for name in ("ecc", "p2p", "pcie", "thermal"))
    expected, budget = gate.get("expected_gpus"), gate.get("psu_budget_w")
    return Policy(
        mode=take.text("mode"),
        on_unknown=take.text("on_unknown"),
        timeout_s=take.number("timeout"),
        gpu_timeout_s=take.number("gpu_timeout"),
        expected_gpus=None if expected is None else int(take.number("expected_gpus")),
        psu_budget_w=None if budget is None else take.number("psu_budget_w"),
        require_ecc=ecc.flag("require_enabled"),
        retired_pages_fail=int(ecc.number("retired_pages_fail")),
        retired_pages_warn=int(ecc.number("retired_pages_warn")),
        sbe_lifetime_warn=int(ecc.number("sbe_lifetime_warn")),
        sbe_per_day_warn=int(ecc.number("sbe_per_day_warn")),
        p2p=p2p.text("policy"),
        functional_test=p2p.flag("functional_test"),
        test_timeout_s=p2p.number("test_timeout"),
        test_bytes=int(p2p.number("test_bytes_mib")) * 1024**2,
        min_width=int(pcie.number("min_width")),
        tensor_rate_fail=pcie.number("tensor_rate_fail"),
        tensor_rate_warn=pcie.number("tensor_rate_warn"),
        pipeline_rate_fail=pcie.number("pipeline_rate_fail"),
        rate_warn=pcie.number("rate_warn"),
        gpu_warn_c=int(thermal.number("gpu_warn_c")),
        hbm_margin_warn_c=int(thermal.number("hbm_margin_warn_c")),
        slowdown_c=int(thermal.number("slowdown_c")),
        idle_warn_c=int(thermal.number("idle_warn_c")),
        state_dir=take.text("state_dir"),
        overrides=tuple(_override(item) for item in take.items("overrides")),
    )


def _override(item: object) -> Override:
    take = _Taker(_mapping(item), "overrides")
    until = take.value("until")
    try:
        day = until if isinstance(until, date) else date.fromisoformat(str(until))
    except ValueError as error:
        raise PolicyError(f"gate.overrides.until: {error}") from error
    return Override(
        check=take.text("check"),
        gpu=take.text("gpu"),
        reason=take.text("reason"),
        by=take.text("by"),
        until=day,
        bound=take.number("bound"),
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


class _Taker:
    """Takes typed values of one mapping and names the key in what it raises."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def value(self, key: str) -> object:
        if key not in self._values:
            raise PolicyError(f"{self._name(key)}: absent from the plan")
        return self._values[key]

    def section(self, key: str) -> _Taker:
        value = self.value(key)
        if not isinstance(value, dict):
            raise self._wrong(key, "a mapping", value)
        return _Taker(cast("Mapping[str, Any]", value), key)

    def items(self, key: str) -> tuple[object, ...]:
        value = self.value(key)
        if not isinstance(value, (list, tuple)):
            raise self._wrong(key, "a list", value)
        return tuple(cast("tuple[object, ...]", value))

    def number(self, key: str) -> float:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        return value

    def text(self, key: str) -> str:
        value = self.value(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a text", value)
        return value

    def flag(self, key: str) -> bool:
        value = self.value(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def _wrong(self, key: str, wanted: str, value: object) -> PolicyError:
        return PolicyError(f"{self._name(key)}: {wanted} is needed, got {value!r}")

    def _name(self, key: str) -> str:
        return ".".join(filter(None, ("gate", self._path, key)))
