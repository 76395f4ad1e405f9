"""The gate's report: one value, as JSON by its published schema."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from healthchecks.launch import Launch
from healthchecks.result import CheckResult, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from healthchecks.facts import GpuFacts, HostFacts, PairFacts
    from healthchecks.overrides import Applied
    from healthchecks.plan import GatePlan

SCHEMA_VERSION = "1"
_PATHS = frozenset({"INTERNAL", "PIX", "PXB", "PHB", "NODE", "SYS"})
_OUTCOMES = frozenset({"ok", "mismatch", "hang", "crash"})


@dataclass(frozen=True)
class Report:
    """One run of the gate."""

    plan: GatePlan
    facts: HostFacts
    checks: tuple[CheckResult, ...]
    verdict: Status
    exit_code: int
    launch: Launch = field(default_factory=Launch)
    overrides: tuple[Applied, ...] = ()
    mode: str = "start"
    generated_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    duration_ms: int = 0

    def worst(self) -> tuple[CheckResult, ...]:
        """Return the results that are neither pass nor skipped, refusing ones first."""
        order = (Status.FAIL, Status.UNKNOWN, Status.WARN)
        return tuple(
            result for status in order for result in self.checks if result.status is status
        )

    def to_json(self) -> str:
        """Return the report as JSON text, valid against the published schema."""
        return json.dumps(self.to_plain(), indent=1) + "\n"

    def to_plain(self) -> dict[str, Any]:
        """Return the report as plain values."""
        stamp = self.generated_at.strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "schema_version": SCHEMA_VERSION,
            "report_id": f"{stamp}-{self.duration_ms:04d}",
            "generated_at": stamp,
            "duration_ms": self.duration_ms,
            "mode": self.mode,
            "verdict": self.verdict.value,
            "exit_code": self.exit_code,
            "plan": {
                "kind": self.plan.kind,
                "gpu_uuids": list(self.plan.uuids) or ["none" if self.plan.uses_gpu else "cpu"],
                "p2p_policy": self.plan.policy.p2p,
                "config_sha256": self.plan.config_sha256,
            },
            "host": _host(self.facts),
            "gpus": [_gpu(gpu) for gpu in self.facts.gpus],
            "pairs": [_pair(self.facts, pair) for pair in self.facts.pairs],
            "checks": [_check(result) for result in self.checks],
            "launch_adjustments": {
                "env": dict(self.launch.env),
                "args": list(self.launch.args),
                "reasons": list(self.launch.reasons),
                "suggested_plan": self.launch.suggested_plan,
            },
            "overrides_applied": _overrides(self.overrides),
        }


def _host(facts: HostFacts) -> dict[str, Any]:
    return {
        "driver_version": facts.driver_version,
        "nvml_version": facts.nvml_version,
        "boot_id": facts.boot_id,
        "in_container": facts.in_container,
        "kernel_log": facts.kernel.log,
    }


def _gpu(gpu: GpuFacts) -> dict[str, Any]:
    capability = gpu.compute_capability
    return {
        "uuid": gpu.uuid or f"index-{gpu.index}",
        "index": gpu.index,
        "name": gpu.name,
        "compute_capability": None if capability is None else "{}.{}".format(*capability),
        "ecc": {
            "mode_current": gpu.ecc.mode_current,
            "mode_pending": gpu.ecc.mode_pending,
            "volatile": {"sbe": gpu.ecc.volatile_sbe, "dbe": gpu.ecc.volatile_dbe},
            "aggregate": {"sbe": gpu.ecc.aggregate_sbe, "dbe": gpu.ecc.aggregate_dbe},
        },
        "retired": {
            "sbe": gpu.retired.sbe,
            "dbe": gpu.retired.dbe,
            "pending": gpu.retired.pending,
        },
        "pcie": {
            "width": gpu.pcie.width,
            "width_max": gpu.pcie.width_max,
            "generation": gpu.pcie.generation,
            "loaded_generation": gpu.pcie.loaded_generation,
            "measured_gb_s": gpu.pcie.loaded_gb_s,
            "replays": gpu.pcie.replays,
        },
        "thermal": {"gpu_c": gpu.thermal.gpu_c, "hbm_c": gpu.thermal.hbm_c},
        "power": {"draw_w": gpu.power.draw_w, "limit_w": gpu.power.limit_w},
        "read_status": dict(gpu.read_status),
    }


def _pair(facts: HostFacts, pair: PairFacts) -> dict[str, Any]:
    names = {gpu.index: gpu.uuid or f"index-{gpu.index}" for gpu in facts.gpus}
    return {
        "a": names.get(pair.a, f"index-{pair.a}"),
        "b": names.get(pair.b, f"index-{pair.b}"),
        "topology": pair.topology if pair.topology in _PATHS else None,
        "p2p_read": {"a_to_b": pair.read_ab, "b_to_a": pair.read_ba},
        "p2p_write": {"a_to_b": pair.write_ab, "b_to_a": pair.write_ba},
        "nvlink_active": pair.nvlink_lanes,
        "functional": pair.functional if pair.functional in _OUTCOMES else "not_run",
        "measured_gb_s": pair.functional_gb_s,
    }


def _check(result: CheckResult) -> dict[str, Any]:
    return {
        "id": result.id,
        "scope": result.scope,
        "status": result.status.value,
        "severity": result.severity.value,
        "observed": result.observed,
        "expected": result.expected,
        "source": result.source,
        "message": result.message,
        "remedy": result.remedy or None,
        "remedy_scope": result.remedy_scope,
        "overridden_by": result.overridden_by,
        "since": result.since,
    }


def _overrides(applied: Sequence[Applied]) -> list[dict[str, Any]]:
    return [
        {
            "check": use.override.check,
            "scope": use.scope,
            "by": use.override.by,
            "reason": use.override.reason,
            "until": use.override.until.isoformat(),
            "status_before": use.before.value,
            "status_after": use.after.value,
        }
        for use in applied
    ]
