"""Gauges of the gate and the sampler: name, help, labels, value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from healthchecks.result import Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from healthchecks.facts import GpuFacts, HostFacts
    from healthchecks.result import CheckResult

LEVELS = {Status.PASS: 0, Status.SKIPPED: 0, Status.WARN: 1, Status.UNKNOWN: 2, Status.FAIL: 3}

HELP = {
    "appliance_gate_check": "Outcome of a check: 0 pass or skipped, 1 warn, 2 unknown, 3 fail",
    "appliance_gate_override": "1 while an override softens a check",
    "appliance_gpu_temperature_celsius": "Temperature of core and memory",
    "appliance_gpu_power_watts": "Power draw",
    "appliance_gpu_power_limit_watts": "Power limit",
    "appliance_gpu_ecc_errors": "Memory errors by kind and span",
    "appliance_gpu_retired_pages": "Retired pages by cause",
    "appliance_gpu_retirement_pending": "1 while a page waits for retirement",
    "appliance_gpu_pcie_width_lanes": "Lanes of the link",
    "appliance_gpu_pcie_replays": "Replay counter of the link",
    "appliance_gpu_utilization_percent": "Share of time with a kernel running",
    "appliance_gpu_sm_clock_mhz": "Core clock",
    "appliance_gpu_xid": "Xids of this boot by number",
}


@dataclass(frozen=True)
class Gauge:
    """One value; a fact that could not be read gives no gauge, never a 0."""

    name: str
    labels: Mapping[str, str]
    value: float


def gauges(facts: HostFacts, results: Sequence[CheckResult]) -> tuple[Gauge, ...]:
    """Return every gauge of one look at the machine."""
    found = [gauge for gpu in facts.gpus for gauge in _gpu(gpu)]
    names = {gpu.index: gpu.uuid or str(gpu.index) for gpu in facts.gpus}
    for event in facts.kernel.xids:
        labels = {
            "gpu": names.get(-1 if event.gpu is None else event.gpu, ""),
            "xid": str(event.xid),
        }
        found.append(Gauge("appliance_gpu_xid", labels, event.count))
    for result in results:
        labels = {"check": result.id, "scope": result.scope, "severity": result.severity.value}
        found.append(Gauge("appliance_gate_check", labels, LEVELS[result.status]))
        if result.overridden_by is not None:
            labels = {"check": result.id, "scope": result.scope, "by": result.overridden_by}
            found.append(Gauge("appliance_gate_override", labels, 1))
    return tuple(found)


def _gpu(gpu: GpuFacts) -> Iterator[Gauge]:
    base = {"gpu": gpu.uuid or str(gpu.index)}
    ecc, retired, pcie, thermal, power = gpu.ecc, gpu.retired, gpu.pcie, gpu.thermal, gpu.power
    values: list[tuple[str, Mapping[str, str], float | None]] = [
        ("temperature_celsius", {"sensor": "core"}, thermal.gpu_c),
        ("temperature_celsius", {"sensor": "memory"}, thermal.hbm_c),
        ("power_watts", {}, power.draw_w),
        ("power_limit_watts", {}, power.limit_w),
        ("ecc_errors", {"kind": "corrected", "span": "driver"}, ecc.volatile_sbe),
        ("ecc_errors", {"kind": "uncorrected", "span": "driver"}, ecc.volatile_dbe),
        ("ecc_errors", {"kind": "corrected", "span": "life"}, ecc.aggregate_sbe),
        ("ecc_errors", {"kind": "uncorrected", "span": "life"}, ecc.aggregate_dbe),
        ("retired_pages", {"cause": "corrected"}, retired.sbe),
        ("retired_pages", {"cause": "uncorrected"}, retired.dbe),
        ("retirement_pending", {}, retired.pending),
        ("pcie_width_lanes", {}, pcie.width),
        ("pcie_replays", {}, pcie.replays),
        ("utilization_percent", {}, gpu.utilization_percent),
        ("sm_clock_mhz", {}, gpu.sm_clock_mhz),
    ]
    for name, labels, value in values:
        if value is not None:
            yield Gauge(f"appliance_gpu_{name}", {**base, **labels}, float(value))


def exposition(found: Sequence[Gauge]) -> str:
    """Return the gauges as Prometheus text."""
    lines: list[str] = []
    for name in dict.fromkeys(gauge.name for gauge in found):
        lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} gauge"]
        lines += [
            f"{name}{{{_labels(gauge)}}} {gauge.value:g}" for gauge in found if gauge.name == name
        ]
    return "".join(f"{line}\n" for line in lines)


def _labels(gauge: Gauge) -> str:
    return ",".join(f'{key}="{_escaped(value)}"' for key, value in gauge.labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
