"""A healthy machine as facts, and shorthand to judge a change of it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from appliance.gate.defaults import plain_section
from healthchecks.context import Context, Evidence
from healthchecks.facts import (
    EccFacts,
    GpuFacts,
    HostFacts,
    KernelFacts,
    PairFacts,
    PcieFacts,
    PowerFacts,
    RetiredFacts,
    ThermalFacts,
)
from healthchecks.judge import judge
from healthchecks.plan import GatePlan
from healthchecks.policy import policy_of
from healthchecks.registry import run_checks
from healthchecks.sample import facts_of_sample
from healthchecks.simulate import plan_as
from healthchecks.state import State

GIB = 1024**3
NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "health_samples"


def healthy_gpu(index: int = 0, **changes: Any) -> GpuFacts:
    """Return a V100 PCIe 32 GB with nothing wrong."""
    gpu = GpuFacts(
        index=index,
        uuid=f"GPU-{index}",
        bus_id=f"00000000:{0x10 + index:02X}:00.0",
        name="Tesla V100-PCIE-32GB",
        compute_capability=(7, 0),
        memory_total_bytes=32 * GIB,
        memory_free_bytes=32 * GIB,
        process_pids=(),
        persistence=True,
        compute_mode="default",
        utilization_percent=0,
        inforom_valid=True,
        alloc="ok",
        ecc=EccFacts(True, True, 0, 0, 0, 0),
        retired=RetiredFacts(0, 0, False, False, False),
        pcie=PcieFacts(
            width=16, width_max=16, generation=3, generation_max=3, replays=0, aer_fatal=0
        ),
        thermal=ThermalFacts(40, 38, 87, 90, 83, 85, ()),
        power=PowerFacts(35.0, 250.0, 250.0, 100.0),
        links=(),
    )
    return replace(gpu, **changes)


def healthy_pair(**changes: Any) -> PairFacts:
    """Return two GPUs below one host bridge with working peer access."""
    pair = PairFacts(0, 1, 0, "PHB", "OK", "OK", "OK", "OK", functional="ok", functional_gb_s=10.0)
    return replace(pair, **changes)


def healthy_host(*gpus: GpuFacts, **changes: Any) -> HostFacts:
    """Return a host with two healthy GPUs, or with the given ones."""
    host = HostFacts(
        gpus=gpus or (healthy_gpu(0), healthy_gpu(1)),
        pairs=(healthy_pair(),),
        driver_version="580.95.05",
        memory_total_bytes=64 * GIB,
        memory_available_bytes=60 * GIB,
        shm_bytes=16 * GIB,
        boot_id="b1",
        in_container=True,
        uvm_node=True,
        kernel=KernelFacts(log="read"),
    )
    return replace(host, **changes)


class Machine:
    """What the tests say: a host, a plan, a judgement."""

    gpu = staticmethod(healthy_gpu)
    pair = staticmethod(healthy_pair)
    host = staticmethod(healthy_host)

    def plan(
        self, kind: str = "tp2", gate: dict[str, Any] | None = None, **changes: Any
    ) -> GatePlan:
        """Return a plan over the first GPU or both; `gate` overlays the section, nested."""
        section = _over(dict(plain_section()), gate or {})
        uuids = ("GPU-0",) if kind == "single" else ("GPU-0", "GPU-1")
        plan = GatePlan(
            kind=kind,
            uuids=uuids,
            policy=policy_of(section),
            config_sha256="c0ffee",
            utilization=0.9,
            shm_bytes=16 * GIB,
        )
        return replace(plan, **changes)

    def context(self, host: HostFacts, plan: GatePlan, **changes: Any) -> Context:
        """Return what the checks are given."""
        return Context(
            host, plan, **{"state": State(), "now": NOW, "evidence": Evidence.LIVE, **changes}
        )

    def judge(self, name: str, host: HostFacts, plan: GatePlan, **changes: Any) -> dict[str, str]:
        """Run one check file and return the worst status by check id."""
        order = ("skipped", "pass", "warn", "unknown", "fail")
        found: dict[str, str] = {}
        for result in run_checks(self.context(host, plan, **changes), [name]):
            worse = max(
                order.index(found.get(result.id, "skipped")), order.index(result.status.value)
            )
            found[result.id] = order[worse]
        return found


def _over(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        merged[key] = _over(dict(base[key]), value) if isinstance(value, dict) else value
    return merged


@pytest.fixture
def machine() -> Machine:
    """Return the shorthand."""
    return Machine()


@pytest.fixture(scope="session")
def samples() -> Path:
    """Return the folder of recorded machines and schemas."""
    if not SAMPLES.is_dir():
        pytest.skip("no shared folder")
    return SAMPLES


@pytest.fixture
def record(samples):
    """Return a fresh copy of the record of a machine with nothing wrong."""
    return json.loads((samples / "d01-reference-pass.json").read_text())


@pytest.fixture
def verdicts(machine):
    """Return the verdicts of a record: single, pp2, tp2 require, tp2 auto."""

    def of(record, evidence=Evidence.LENIENT):
        facts, uuids = facts_of_sample(record)
        found = []
        for kind, p2p in (("single", "auto"), ("pp2", "auto"), ("tp2", "require"), ("tp2", "auto")):
            policy = machine.plan(kind, {"p2p": {"policy": p2p}}).policy
            found.append(
                judge(Context(facts, plan_as(kind, uuids, policy), evidence)).verdict.value
            )
        return " ".join(found)

    return of
