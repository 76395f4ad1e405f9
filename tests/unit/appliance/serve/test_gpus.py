"""What the sampler's verdicts mean for a run; the sampler is real, the machine invented."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from appliance.gate.defaults import plain_section
from appliance.serve.gpus import GpuWatch, latched_fault, watch_gpus
from healthchecks.assumed import assumed_host
from healthchecks.facts import EccFacts, GpuFacts, HostFacts, ThermalFacts
from healthchecks.sampler import Sampler, SampleVerdict

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.plan.launch_plan import LaunchPlan

DBE = EccFacts(True, True, 0, 1, 0, 1)


class Deaf:
    """Hears no Xid."""

    def heard(self) -> list[tuple[str, int]]:
        return []

    def close(self) -> None:
        pass


class Machine:
    """Two assumed V100s whose facts a test changes between samples."""

    def __init__(self, state: Path) -> None:
        self.host = assumed_host("2x16GiB")
        self.verdicts: list[SampleVerdict] = []
        self.sampler = Sampler(
            {**plain_section(), "state_dir": str(state)},
            [gpu.uuid or "" for gpu in self.host.gpus],
            15.0,
            kind="tp2",
            read=lambda _plan: self.host,
            listen=lambda _uuids: Deaf(),
            on_change=self.verdicts.append,
        )

    def sample(self, change: Callable[[GpuFacts], GpuFacts], count: int) -> SampleVerdict:
        first, *others = self.host.gpus
        self.host = replace(self.host, gpus=(change(first), *others))
        return [self.sampler.sample() for _ in range(count)][-1]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine that forgets after the test."""
    return Machine(tmp_path)


def test_uncorrected_memory_error_is_a_fault_from_the_second_sample_on(machine: Machine) -> None:
    first = machine.sample(lambda gpu: replace(gpu, ecc=DBE), 1)
    second = machine.sample(lambda gpu: gpu, 1)

    fault = latched_fault(second)

    assert latched_fault(first) is None
    assert fault is not None
    assert fault.code == "GPU_FAULT"
    assert fault.where.endswith("ecc.dbe.volatile")
    assert any(latched_fault(verdict) is not None for verdict in machine.verdicts)


def test_heat_takes_readiness_and_is_no_fault(machine: Machine) -> None:
    hot = ThermalFacts(95, 38, 87, 97, 83, 85, ("hw_thermal_slowdown",))

    verdict = machine.sample(lambda gpu: replace(gpu, thermal=hot), 10)

    assert not verdict.ready
    assert latched_fault(verdict) is None


def test_devices_taken_away_are_a_fault_that_names_the_container(machine: Machine) -> None:
    machine.host = HostFacts(nvml="unknown_error")

    verdict = [machine.sampler.sample() for _ in range(2)][-1]
    fault = latched_fault(verdict)

    assert fault is not None
    assert fault.code == "NVML_LOST"
    assert GpuWatch(machine.sampler).status().nvml_lost


def test_status_carries_the_gauges_of_the_last_sample(machine: Machine) -> None:
    watch = GpuWatch(machine.sampler)
    before = watch.status()

    machine.sample(lambda gpu: replace(gpu, thermal=ThermalFacts(41, 38, 87, 90, 83, 85, ())), 1)
    after = watch.status()

    assert before.metrics == ""
    assert not before.ready
    assert "# TYPE appliance_gpu_temperature_celsius gauge" in after.metrics
    assert after.metrics.count(" 41\n") == 1


def test_plan_without_gpus_is_ready_and_starts_nothing(plan: Callable[..., LaunchPlan]) -> None:
    made = replace(plan(execution={"device": "cpu"}), gate=plain_section())
    threads = threading.active_count()

    watch = watch_gpus(made, lambda fault: pytest.fail(str(fault)), lambda: None)
    watch.start()

    assert watch.status().ready
    assert watch.status().metrics == ""
    assert threading.active_count() == threads
