"""The background sampler: hysteresis, latches, events, staleness, what it remembers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.gate.defaults import plain_section
from healthchecks.facts import EccFacts, LinkFacts, PcieFacts, PowerFacts, ThermalFacts
from healthchecks.metrics import HELP, exposition, gauges
from healthchecks.sampler import Sampler
from healthchecks.state_file import StateFile

DBE = {"ecc": EccFacts(True, True, 0, 1, 0, 1)}


class Deaf:
    """Hears what a test puts into `events`, once."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def heard(self) -> list[tuple[str, int]]:
        found, self.events = self.events, []
        return found

    def close(self) -> None:
        self.events = []


class Bench:
    """A sampler on a machine that the test changes between samples."""

    def __init__(self, machine, tmp_path, **options) -> None:
        self.machine, self.host, self.now = machine, machine.host(), 0.0
        self.ear, self.changes = Deaf(), []
        section = {**plain_section(), "state_dir": str(tmp_path), **options.pop("gate", {})}
        self.sampler = Sampler(
            section,
            options.pop("uuids", ("GPU-0", "GPU-1")),
            15.0,
            kind=options.pop("kind", "tp2"),
            read=lambda _plan: self.host,
            listen=lambda _uuids: self.ear,
            clock=lambda: self.now,
            on_change=self.changes.append,
            **options,
        )

    def sample(self, **changes):
        """Sample with GPU 0 changed; 15 s pass."""
        self.host = replace(self.host, gpus=(self.machine.gpu(0, **changes), self.machine.gpu(1)))
        self.now += 15.0
        return self.sampler.sample()


@pytest.fixture
def bench(machine, tmp_path):
    return Bench(machine, tmp_path)


def hot(core: int, reasons: tuple[str, ...] = (), hbm: int = 38):
    return {"thermal": ThermalFacts(core, hbm, 87, 90, 83, 85, reasons)}


def statuses(verdict, check):
    return {result.status.value for result in verdict.results if result.id == check}


def test_sampler_is_not_ready_before_the_first_sample(bench):
    assert not bench.sampler.latest().ready
    assert bench.sample().ready


def test_one_bad_sample_is_not_enough_and_three_good_bring_it_back(bench):
    bench.sample()

    seen = [bench.sample(inforom_valid=False).ready for _ in range(2)]
    back = [bench.sample().ready for _ in range(3)]

    assert seen == [True, False]
    assert back == [False, False, True]
    assert [change.ready for change in bench.changes] == [True, True, False, False, True]


def test_double_bit_error_stays_although_the_counter_drops(bench):
    bench.sample(**DBE)
    bench.sample(**DBE)

    for _ in range(5):
        verdict = bench.sample()

    assert not verdict.ready
    assert verdict.reason.endswith("(latched)")


def test_slowdown_refuses_at_six_of_ten_and_is_over_after_five_quiet_minutes(bench):
    for _ in range(5):
        assert statuses(bench.sample(**hot(60, ("hw_thermal_slowdown",))), "thermal.slowdown") == {
            "warn",
            "pass",
        }
    bench.sample()
    assert "fail" in statuses(bench.sample(**hot(60, ("hw_thermal_slowdown",))), "thermal.slowdown")

    during = [bench.sample() for _ in range(19)]
    after = bench.sample()

    assert all("fail" in statuses(verdict, "thermal.slowdown") for verdict in during)
    assert statuses(after, "thermal.slowdown") == {"pass"}


@pytest.mark.parametrize(("core", "wanted"), [(81, "warn"), (80, "pass")])
def test_warm_core_stays_warm_until_it_leaves_the_band(bench, core, wanted):
    bench.sample(**hot(83))

    found = statuses(bench.sample(**hot(core)), "thermal.gpu")

    assert ("warn" in found) == (wanted == "warn")


@pytest.mark.parametrize(("hbm", "wanted"), [(76, "warn"), (75, "pass")])
def test_warm_memory_stays_warm_until_it_leaves_the_band(bench, hbm, wanted):
    bench.sample(**hot(40, (), 78))

    found = statuses(bench.sample(**hot(40, (), hbm)), "thermal.hbm")

    assert ("warn" in found) == (wanted == "warn")


def test_sensor_error_counts_after_three_in_a_row(bench):
    silent = {"power": PowerFacts(None, 250.0, failed_reads=3)}

    seen = ["warn" in statuses(bench.sample(**silent), "power.read") for _ in range(3)]

    assert seen == [False, False, True]


def test_xid_event_is_heard_kept_and_remembered_for_the_next_start(bench, tmp_path):
    bench.sample()
    bench.ear.events = [("GPU-0", 79)]

    bench.sample()
    verdict = bench.sample()

    assert not verdict.ready
    latches = StateFile(tmp_path).load().gpus["GPU-0"].latched
    assert [latch.check for latch in latches] == ["xid.79"]


def test_rc_032_lost_devices_fail_liveness_and_no_other_verdict_does(machine, tmp_path):
    bench = Bench(machine, tmp_path)
    bench.host = machine.host(nvml="unknown_error", gpus=(), pairs=())
    bench.sampler.sample()
    lost = bench.sampler.sample()
    other = Bench(machine, tmp_path)
    other.sample(**DBE)

    assert lost.nvml_lost
    assert not other.sample(**DBE).nvml_lost


def test_hanging_nvml_ends_readiness(machine, tmp_path):
    bench = Bench(machine, tmp_path)
    bench.host = machine.host(nvml="timeout", gpus=(), pairs=())

    assert [bench.sampler.sample().ready for _ in range(2)] == [True, False]


def test_old_sample_is_not_ready(bench):
    bench.sample()
    bench.now += 3 * (15.0 + 20.0) - 1
    assert bench.sampler.latest().ready

    bench.now += 1

    assert not bench.sampler.latest().ready


def test_mode_warn_never_ends_readiness_and_mode_off_watches_nothing(machine, tmp_path):
    warn = Bench(machine, tmp_path, gate={"mode": "warn"})
    off = Bench(machine, tmp_path, gate={"mode": "off"})

    assert [warn.sample(**DBE).ready for _ in range(3)] == [True, True, True]
    assert off.sampler.latest().ready


def test_cpu_engine_is_ready_without_a_sample(machine, tmp_path):
    bench = Bench(machine, tmp_path, uuids=())
    bench.sampler.start()

    assert bench.sampler.latest().ready
    bench.sampler.stop()


def test_spinning_collective_ends_readiness(machine, tmp_path):
    bench = Bench(machine, tmp_path, stalled_s=lambda: 61.0)
    gpus = [machine.gpu(i, utilization_percent=100, power=PowerFacts(47.0, 250.0)) for i in (0, 1)]
    bench.host = machine.host(*gpus)
    bench.sampler.sample()

    verdict = bench.sampler.sample()

    assert not verdict.ready
    assert verdict.reason.startswith("engine.spin")


def test_replays_are_counted_over_minutes(bench):
    for minute in range(5):
        verdict = bench.sample(pcie=PcieFacts(16, 16, 3, 3, replays=100 * minute))

    assert "warn" in statuses(verdict, "pcie.replay")


def test_lane_errors_are_counted_a_second(machine, tmp_path):
    bench = Bench(machine, tmp_path)
    bench.host = machine.host(pairs=(machine.pair(nvlink_lanes=2),))
    for errors in (0, 1500):
        verdict = bench.sample(links=(LinkFacts(0, active=True, crc_errors=errors),))

    assert "fail" in statuses(verdict, "nvlink.errors")


def test_thread_samples_by_itself_and_ends(machine, tmp_path):
    bench = Bench(machine, tmp_path)
    seen = []
    bench.sampler._on_change = seen.append

    bench.sampler.start()
    bench.sampler._stop.wait(0.0)
    while not seen:
        bench.sampler._thread.join(0.01)
    bench.sampler.stop()

    assert bench.sampler.latest().samples >= 1
    assert not bench.sampler._thread.is_alive()


def test_metrics_carry_every_check_and_gpu_and_no_zero_for_the_unknown(bench):
    verdict = bench.sample(thermal=ThermalFacts(None, 38), name='a"b\\c')

    found = gauges(verdict.facts, verdict.results)
    text = exposition(found)

    assert {gauge.name for gauge in found} <= set(HELP)
    assert not [g for g in found if g.labels.get("sensor") == "core" and g.labels["gpu"] == "GPU-0"]
    assert 'appliance_gate_check{check="thermal.gpu",scope="gpu:GPU-0",severity="soft"} 2' in text
    assert 'appliance_gpu_power_watts{gpu="GPU-1"} 35' in text
