"""The real NVML binding on the fake library: values, old drivers, lost and silent GPUs, hangs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from waiting import zombies

from healthchecks.codec import from_plain
from healthchecks.context import Context
from healthchecks.facts import GpuFacts, HostFacts, LinkFacts, PairFacts
from healthchecks.judge import judge
from healthchecks.nvml import NvmlUnavailable, binding_version, read_host
from healthchecks.simulate import load_state


def read(timeout_s=10.0, gpu_timeout_s=5.0):
    return read_host(timeout_s=timeout_s, gpu_timeout_s=gpu_timeout_s)


@pytest.mark.usefixtures("lab")
def test_healthy_host_is_read_whole():
    host = read()

    first = host.gpus[0]
    assert (first.uuid, first.name, first.compute_capability) == (
        "GPU-0",
        "Tesla V100-PCIE-32GB",
        (7, 0),
    )
    assert (first.memory_total_bytes, first.process_pids, first.compute_mode) == (
        32 * 1024**3,
        (),
        "default",
    )
    assert first.ecc.volatile_dbe_at == {"l1": 0, "l2": 0, "device": 0, "register": 0, "cbu": 0}
    assert (first.thermal.hbm_c, first.thermal.hbm_max_c, first.thermal.reasons) == (
        38,
        85,
        ("gpu_idle",),
    )
    assert (first.power.draw_w, first.power.limit_w, first.links) == (35.0, 250.0, ())
    pair = host.pairs[0]
    assert (pair.topology, pair.read_ab, pair.write_ba, pair.nvlink_lanes) == ("PHB", "OK", "OK", 0)
    assert binding_version() is not None


def test_recorded_machine_is_read_as_its_record_says(sample_path, lab, convert):
    record = json.loads(sample_path.read_text())
    lab.machine(convert.scenario_of(record, fill_healthy=False))
    blocked = any("block" in text for text in record["behaviour"])
    if record["host"]["driver_loaded"] is False:
        with pytest.raises(NvmlUnavailable, match="driver_not_loaded"):
            read()
        return

    found = read(gpu_timeout_s=0.5 if blocked else 5.0, timeout_s=2.0 if blocked else 10.0)

    if blocked:
        assert all("*" in gpu.read_status for gpu in found.gpus)
        return
    facts, _, _ = load_state(sample_path)
    by_index = {gpu.index: gpu for gpu in found.gpus}
    for shown in facts.gpus:
        assert _same(shown, by_index[shown.index]) == []
    pairs = {(pair.a, pair.b): pair for pair in found.pairs}
    for shown in facts.pairs:
        read_pair = pairs[(shown.a, shown.b)]
        for name in ("topology", "read_ab", "read_ba", "write_ab", "write_ba"):
            value = getattr(shown, name)
            assert value is None or value == getattr(read_pair, name), name


def _same(shown, found) -> list[str]:
    """Return the names of the values that a record shows and the binding reads differently."""
    wrong = []
    flat = (
        "name",
        "compute_capability",
        "memory_total_bytes",
        "persistence",
        "utilization_percent",
    )
    for name in flat:
        value = getattr(shown, name)
        if value is not None and value != getattr(found, name):
            wrong.append(name)
    for section in ("ecc", "retired", "pcie", "thermal", "power"):
        for name, value in vars(getattr(shown, section)).items():
            known = getattr(getattr(found, section), name)
            measured_later = name.startswith(("loaded_", "replays_per", "volatile_dbe_at"))
            if name == "failed_reads" and shown.power.draw_w is None and value:
                wrong += [] if known == value else [name]
            elif value not in (None, (), {}) and not measured_later and value != known:
                wrong.append(f"{section}.{name}")
    if shown.links is not None:
        wrong += (
            [] if [x.active for x in shown.links] == [x.active for x in found.links] else ["links"]
        )
    return wrong


@pytest.mark.parametrize("driver", ["470", "535", "newest"])
def test_old_driver_lacks_symbols_and_nothing_dies(lab, driver):
    lab.machine(driver=driver)

    host = read()

    assert host.gpus[0].process_pids == ()
    assert host.gpus[0].ecc.volatile_dbe == 0
    assert host.gpus[0].memory_total_bytes == 32 * 1024**3


def test_driver_470_symbols_are_really_absent(lab):
    lab.machine(driver="470")
    read()

    calls = {line.split()[0] for line in lab.trace.read_text().splitlines()}
    assert "nvmlDeviceGetComputeRunningProcesses_v2" in calls
    assert "nvmlDeviceGetComputeRunningProcesses_v3" not in calls


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (9, "driver_not_loaded"),
        (18, "version_mismatch"),
        (4, "no_permission"),
        (999, "unknown_error"),
        (77, "error:77"),
    ],
)
def test_init_that_is_refused_has_its_kind(lab, code, kind):
    lab.machine({"init": {"error": code}, "gpus": []})

    with pytest.raises(NvmlUnavailable) as caught:
        read()
    assert caught.value.kind == kind


def test_library_that_is_absent_or_broken_has_its_kind(lab, monkeypatch):
    empty = lab.tmp / "empty"
    empty.mkdir()
    (empty / "libnvidia-ml.so.1").write_bytes(b"")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(empty))

    with pytest.raises(NvmlUnavailable) as caught:
        read()
    assert caught.value.kind == "library_not_found"


def test_init_that_hangs_ends_at_the_deadline_without_a_zombie(lab):
    lab.machine(lab.healthy() | {"faults": [{"call": "nvmlInitWithFlags", "hang_ms": -1}]})
    started = time.monotonic()

    with pytest.raises(NvmlUnavailable) as caught:
        read(timeout_s=1.0)

    assert caught.value.kind == "timeout"
    assert time.monotonic() - started < 2.5
    assert zombies() == []


def test_one_gpu_that_hangs_leaves_the_other_readable(lab):
    lab.machine(
        lab.healthy() | {"faults": [{"call": "nvmlDeviceGetEccMode", "gpu": 0, "hang_ms": -1}]}
    )

    host = read(gpu_timeout_s=1.0)

    assert host.gpus[0].read_status == {"*": "timeout"}
    assert host.gpus[1].ecc.mode_current is True
    assert zombies() == []


def test_gpu_that_kills_its_reader_leaves_the_other_readable(lab):
    lab.machine(
        lab.healthy() | {"faults": [{"call": "nvmlDeviceGetEccMode", "gpu": 1, "abort": True}]}
    )

    host = read()

    assert host.gpus[1].read_status == {"*": "crash:-6"}
    assert host.gpus[0].ecc.mode_current is True


def test_pairs_that_hang_leave_the_gpus_readable(lab):
    lab.machine(lab.healthy() | {"faults": [{"call": "nvmlDeviceGetP2PStatus", "hang_ms": -1}]})

    host = read(timeout_s=3.0)

    assert [gpu.uuid for gpu in host.gpus] == ["GPU-0", "GPU-1"]
    assert host.pairs == ()


def test_power_sensor_that_fails_once_is_read_again(lab):
    once = {"call": "nvmlDeviceGetPowerUsage", "gpu": 0, "times": 1, "return": 999}
    lab.machine(lab.healthy() | {"faults": [once]})

    power = read().gpus[0].power

    assert (power.draw_w, power.failed_reads) == (35.0, 1)


def test_gpu_that_is_lost_between_reads_says_so(lab):
    lost = {"call": "*", "gpu": 1, "after": 20, "return": 15}
    lab.machine(lab.healthy() | {"faults": [lost]})

    host = read()

    assert "gpu_is_lost" in host.gpus[1].read_status.values()
    assert "gpu_is_lost" not in host.gpus[0].read_status.values()


def test_asymmetric_peer_access_is_read_by_direction(lab):
    scenario = lab.healthy()
    scenario["pairs"][0].update(read_ba=5, write_ba=1)
    lab.machine(scenario)

    pair = read().pairs[0]

    assert (pair.read_ab, pair.read_ba, pair.write_ab, pair.write_ba) == (
        "OK",
        "NOT_SUPPORTED",
        "OK",
        "CHIPSET_NOT_SUPPORTED",
    )


def test_lanes_between_two_boards_are_counted_by_their_other_end(lab):
    scenario = lab.healthy()
    ends = [scenario["gpus"][1]["bus_id"]] * 2 + ["00000000:FF:00.0"]
    scenario["gpus"][0]["links"] = [{"active": 1, "remote": bus, "crc_errors": 3} for bus in ends]
    scenario["gpus"][0]["links"].append({"active": 0})
    lab.machine(scenario)

    host = read()

    assert host.pairs[0].nvlink_lanes == 2
    assert host.gpus[0].links[0] == LinkFacts(0, True, "00000000:11:00.0", crc_errors=3)
    assert [lane.active for lane in host.gpus[0].links] == [True, True, True, False]


def test_scenario_that_changes_is_seen_by_the_next_read(lab):
    read()
    scenario = lab.healthy()
    scenario["gpus"][0]["ecc"]["volatile_dbe"] = 1
    lab.machine(scenario)

    assert read().gpus[0].ecc.volatile_dbe == 1


# What a refused call leaves of the verdict: a hard check is unknown, a soft one warns.
HARD_CALLS = [
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetRetiredPages",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceValidateInforom",
    "nvmlSystemGetDriverVersion",
]
SOFT_CALLS = [
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetTopologyCommonAncestor",
]
SPARE_CALLS = [
    "nvmlDeviceGetMemoryErrorCounter",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetPcieReplayCounter",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetName",
    "nvmlDeviceGetSerial",
    "nvmlDeviceGetComputeRunningProcesses_v3",
]
MISSING_CALLS = ["nvmlDeviceGetUUID", "nvmlDeviceGetHandleByIndex_v2"]
CALLS = [
    *HARD_CALLS,
    *SOFT_CALLS,
    *SPARE_CALLS,
    *MISSING_CALLS,
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetP2PStatus",
]

# One process for all calls, because starting one costs more than the reads.
READ_ALL = """
import json, os, sys
from healthchecks.nvml import binding, steps
scenario = json.load(sys.stdin)
for call in scenario.pop("calls"):
    scenario["faults"] = [{"call": call, "return": scenario["code"]}]
    with open(os.environ["NVML_FAKE_SCENARIO"], "w") as file:
        json.dump(scenario, file)
    print(json.dumps([call, list(steps(binding(), ()))]))
"""


def facts_of(steps: list[dict]) -> HostFacts:
    """Return the host that the steps tell of, with what CUDA adds on a healthy machine."""
    gpus = [from_plain(GpuFacts, step["gpu"]) for step in steps if "gpu" in step]
    pairs = [from_plain(PairFacts, step["pair"]) for step in steps if "pair" in step]
    host = from_plain(HostFacts, next(step["host"] for step in steps if "host" in step))
    return replace(
        host,
        gpus=tuple(replace(gpu, alloc="ok") for gpu in gpus),
        pairs=tuple(replace(pair, functional="ok") for pair in pairs),
    )


def wanted_verdict(call: str, code: int) -> str:
    if call in MISSING_CALLS or (code == 15 and "System" not in call and call not in PAIR_CALLS):
        return "fail"
    if call in HARD_CALLS:
        return "unknown"
    return "warn" if call in SOFT_CALLS else "pass"


PAIR_CALLS = ("nvmlDeviceGetP2PStatus", "nvmlDeviceGetTopologyCommonAncestor")


@pytest.mark.parametrize(
    "code", [3, 4, 999, 15], ids=["not_supported", "no_permission", "unknown", "lost"]
)
def test_rc_063_every_call_may_be_refused_and_the_verdict_is_right(lab, code):
    text = json.dumps(lab.healthy() | {"calls": CALLS, "code": code})
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL], input=text, capture_output=True, text=True, check=True
    )

    wrong = {}
    for line in done.stdout.splitlines():
        call, steps = json.loads(line)
        report = judge(Context(facts_of(steps), lab.plan("tp2")))
        if report.verdict != wanted_verdict(call, code):
            wrong[call] = (report.verdict.value, [result.id for result in report.worst()])
    assert wrong == {}
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("lab")
def test_two_reads_of_one_machine_are_equal():
    assert read() == read()
