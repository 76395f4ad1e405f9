"""Faults that people reported, by the id of the case: verdict, message, exit code, adjustment."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from healthchecks.collect import Depth, collect
from healthchecks.nvml import read_host
from healthchecks.probing import probe_collective
from healthchecks.runner import Options, run
from healthchecks.state_file import StateFile

MIB, GIB = 1024**2, 1024**3
NVLINK = {"nvlink_lanes": 2}


def ids(report) -> list[str]:
    return [result.id for result in report.worst()]


def message(report) -> str:
    return report.worst()[0].message


def changed(lab, section: str, gpu: int = 0, **values):
    scenario = lab.healthy()
    scenario["gpus"][gpu][section].update(values)
    lab.machine(scenario)


def test_rc_001_no_library_and_no_driver_are_exit_11_with_different_words(lab, monkeypatch):
    lab.machine({"init": {"error": 9}, "gpus": []})
    loaded = run(lab.plan("single"), Options(Depth(cuda=False)))
    (lab.tmp / "libnvidia-ml.so.1").write_bytes(b"")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(lab.tmp))
    absent = run(lab.plan("single"), Options(Depth(cuda=False)))

    assert (loaded.exit_code, absent.exit_code) == (11, 11)
    assert "load the NVIDIA driver" in loaded.worst()[0].remedy
    assert "container toolkit" in absent.worst()[0].remedy


@pytest.mark.parametrize(
    ("node", "words"), [(False, "nvidia-uvm is absent"), (True, "CUDA does not work")]
)
def test_rc_003_nvml_alone_proves_nothing(lab, node, words):
    lab.cuda(init=999)
    facts = replace(collect(lab.plan("single")), uvm_node=node)

    report = run(
        lab.plan("single"), Options(read=lambda _plan, _depth: facts, names=("nvml", "cuda"))
    )

    assert (report.exit_code, ids(report)) == (20, ["gpu.alloc"])
    assert words in message(report)
    assert "999" in message(report)


def test_rc_004_custom_all_reduce_without_nvlink_is_refused_by_name(lab):
    facts = collect(lab.plan("tp2"), Depth(cuda=False))
    plan = replace(lab.plan("tp2"), custom_all_reduce=True)

    report = run(plan, Options(read=lambda _plan, _depth: facts, names=("p2p",)))

    assert (report.exit_code, ids(report)[0]) == (20, "pair.custom_all_reduce")
    assert "spin for ever" in message(report)


def test_rc_004_spin_is_told_by_busy_cold_and_silent(gate, lab):
    changed(lab, "power", draw=47.0)
    scenario = lab.healthy()
    for gpu in scenario["gpus"]:
        gpu["utilization"], gpu["power"]["draw"] = 100, 47.0
    lab.machine(scenario)

    assert ids(gate(stalled_s=180.0)) == ["engine.spin"]
    assert ids(gate(stalled_s=None)) == []


@pytest.mark.parametrize(
    ("outcome", "env", "status"), [("hang", {"NCCL_P2P_DISABLE": "1"}, "warn"), ("ok", {}, "pass")]
)
def test_rc_005_the_transfer_decides_over_the_flags(gate, outcome, env, status):
    report = gate(pair={"functional": outcome, "functional_detail": "copy a->b: no end in 15 s"})

    assert (report.verdict, report.exit_code, dict(report.launch.env)) == (status, 0, env)
    if env:
        assert report.launch.args == ("--disable-custom-all-reduce",)
        assert "no end in 15 s" in report.launch.reasons[0]


def test_rc_006_acs_turns_p2p_off_unless_it_is_required(gate):
    pair = {"functional": "hang"}

    auto, required = gate(pair=pair), gate(policy={"p2p": {"policy": "require"}}, pair=pair)

    assert (auto.exit_code, auto.launch.env["NCCL_P2P_DISABLE"]) == (0, "1")
    assert required.exit_code == 20
    assert "ACS" in required.worst()[0].remedy


def test_rc_007_data_that_never_arrives_overrules_the_driver(lab, monkeypatch):
    monkeypatch.setattr("healthchecks.collect.has_torch", lambda: False)
    lab.cuda(peer="zeros")
    quick = {"p2p": {"test_bytes_mib": 1, "test_timeout": 20.0}}
    facts = collect(lab.plan("tp2", quick))
    read = Options(read=lambda _plan, _depth: facts, names=("p2p", "functional"))

    report = run(lab.plan("tp2", quick), read)
    required = run(lab.plan("tp2", {"p2p": {**quick["p2p"], "policy": "require"}}), read)

    assert (facts.pairs[0].read_ab, facts.pairs[0].functional) == ("OK", "mismatch")
    assert (report.verdict, report.exit_code) == ("warn", 0)
    assert dict(report.launch.env) == {"NCCL_P2P_DISABLE": "1", "VLLM_SKIP_P2P_CHECK": "0"}
    assert required.exit_code == 20


def test_rc_008_own_probe_counts_its_deadline_as_a_failed_transfer(gate):
    report = gate(pair={"functional": "hang", "functional_detail": "copy b->a: no end in 15 s"})

    assert ids(report) == ["pair.functional"]
    assert "does not end" in message(report)


def test_rc_009_segfault_of_the_two_rank_test_refuses_with_candidates(gate, monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome, detail = probe_collective(("GPU-0", "GPU-1"), 20.0, p2p=False)

    report = gate(pair={"collective_no_p2p": outcome, "collective_detail": detail})

    assert (outcome, report.exit_code, ids(report)) == ("crash", 20, ["pair.collective"])
    assert "signal 11" in message(report)
    assert "NCCL_CUMEM_ENABLE=0" in report.worst()[0].remedy


def test_rc_010_left_over_variable_on_a_working_nvlink_pair_is_named(gate):
    report = gate(pair=NVLINK, environment={"NCCL_P2P_DISABLE": "1"})

    assert (report.verdict, ids(report)) == ("warn", ["host.environment"])
    assert "NCCL_P2P_DISABLE=1" in message(report)


def test_rc_015_busy_gpu_is_refused_with_the_numbers(gate, lab):
    changed(lab, "memory", used=9 * GIB)

    report = gate("single")

    assert (report.exit_code, ids(report)) == (20, ["gpu.busy"])
    assert "23552 MiB free of 32768 MiB, 29491 MiB needed" in message(report)
    assert "outside this pid namespace" in message(report)


def test_rc_018_host_memory_below_the_shards_is_refused(gate):
    report = gate(memory_available_bytes=8 * GIB, largest_shard_bytes=5 * GIB)

    assert (report.exit_code, ids(report)) == (20, ["host.memory"])
    assert "not GPU memory" in message(report)


def test_rc_019_uncorrected_error_is_named_and_not_called_a_memory_shortage(gate, lab):
    changed(lab, "ecc", volatile_dbe=1, aggregate_dbe=1)

    report = gate("single")

    assert (report.exit_code, ids(report)[0]) == (20, "ecc.dbe.volatile")
    assert "not a memory shortage" in report.worst()[0].remedy


def test_rc_019_ecc_that_is_off_is_refused_and_its_counters_are_never_zero(gate, lab):
    names = ("volatile_sbe", "volatile_dbe", "aggregate_sbe", "aggregate_dbe")
    refused = {name: {"error": 3} for name in names}
    changed(lab, "ecc", mode_current=0, mode_pending=0, volatile_dbe_at={}, **refused)

    report = gate("single")

    assert report.exit_code == 20
    assert {result.id: result.status.value for result in report.worst()} == {
        "ecc.mode": "fail",
        "ecc.dbe.volatile": "unknown",
        "ecc.dbe.growth": "unknown",
        "ecc.sbe.lifetime": "unknown",
    }


@pytest.mark.parametrize(
    ("pages", "pending", "first"),
    [(0, 0, None), (3, 0, None), (61, 0, "mem.retired_total"), (3, 1, "mem.pending")],
)
def test_rc_020_retired_pages_by_count_and_pending_flag(gate, lab, pages, pending, first):
    changed(lab, "retired", dbe=pages, pending=pending, pending_dbe=pending)

    report = gate("single")

    assert report.exit_code == (20 if first else 0)
    assert (ids(report) or [None])[0] == first


def test_rc_020_growth_since_the_last_start_warns_with_both_numbers(gate, lab):
    changed(lab, "retired", sbe=2)
    gate("single")
    changed(lab, "retired", sbe=3)

    report = gate("single")

    assert (report.verdict, ids(report)) == ("warn", ["mem.retired_growth"])
    assert "from 2 to 3" in message(report)


def test_rc_020_row_remapping_is_never_asked_of_a_volta(gate, lab):
    gate("single")

    assert "RemappedRows" not in lab.trace.read_text()


def test_rc_021_memory_temperature_counts_and_a_missing_sensor_is_not_zero(gate, lab):
    changed(lab, "thermal", hbm=81)
    hot = gate("single")
    changed(lab, "thermal", hbm={"error": 3})
    blind = gate("single")

    assert (hot.verdict, ids(hot)) == ("warn", ["thermal.hbm"])
    assert [(result.id, result.status.value) for result in blind.worst()] == [
        ("thermal.hbm", "unknown")
    ]
    assert blind.exit_code == 0


@pytest.mark.parametrize(("kind", "code"), [("single", 0), ("pp2", 0), ("tp2", 20)])
def test_rc_022_four_lanes_refuse_tensor_parallelism_only(gate, lab, kind, code):
    changed(lab, "pcie", width=4, width_max=4)

    report = gate(kind)

    assert report.exit_code == code
    assert "x4" in message(report)


def test_rc_022_slow_at_idle_and_fast_under_load_passes(gate, lab):
    changed(lab, "pcie", generation=1)
    facts = read_host(timeout_s=10.0, gpu_timeout_s=5.0)
    loaded = tuple(
        replace(gpu, alloc="ok", pcie=replace(gpu.pcie, loaded_generation=3)) for gpu in facts.gpus
    )

    assert gate(gpus=loaded).verdict == "pass"
    assert gate().exit_code == 20


def test_rc_022_gpu_on_the_bus_without_the_driver_is_named(gate):
    assert "host.gpu_unlinked" in ids(gate("single", pci_gpus=3))


def test_rc_023_corrected_errors_during_the_copy_warn_and_fatal_ones_refuse(gate):
    facts = read_host(timeout_s=10.0, gpu_timeout_s=5.0)

    def with_errors(**errors):
        gpus = tuple(
            replace(gpu, alloc="ok", pcie=replace(gpu.pcie, **errors)) for gpu in facts.gpus
        )
        return gate("single", gpus=gpus)

    assert with_errors(aer_correctable_during_load=11).verdict == "warn"
    assert with_errors(aer_fatal=1).exit_code == 20
    assert with_errors(aer_correctable_during_load=10, aer_fatal=1).verdict == "pass", (
        "counted before"
    )


def test_rc_024_word_left_by_the_supervisor_refuses_fast_until_the_host_boots(lab):
    file = StateFile(lab.tmp / "state")
    boot = collect(lab.plan("single"), Depth(cuda=False)).boot_id
    file.require_action("D_STATE pid=4711", boot)
    lab.machine(lab.healthy() | {"faults": [{"call": "nvmlInitWithFlags", "hang_ms": -1}]})
    started = time.monotonic()

    report = run(lab.plan("single"))
    took_s = time.monotonic() - started

    assert (report.exit_code, ids(report)) == (20, ["host.action"])
    assert "D_STATE pid=4711" in message(report)
    assert took_s < 5.0
    assert file.required_action("another boot") is None


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_rc_024_word_that_cannot_be_read_refuses_all_the_same(lab, text):
    folder = lab.tmp / "state"
    folder.mkdir()
    (folder / "HOST_ACTION_REQUIRED").write_text(text)

    assert ids(run(lab.plan("single"))) == ["host.action"]


def test_rc_030_mismatch_of_driver_and_library_is_named(lab):
    lab.machine({"init": {"error": 18}, "gpus": []})

    report = run(lab.plan("single"), Options(Depth(cuda=False)))

    assert (report.exit_code, ids(report)) == (20, ["nvml.init"])
    assert "library was upgraded under the loaded module" in report.worst()[0].remedy


def test_rc_031_compat_library_that_hides_the_driver_is_refused_by_path(gate):
    report = gate(shadowing_libcuda="/usr/local/cuda/compat/libcuda.so.520.61.05")

    assert (report.exit_code, ids(report)) == (20, ["driver.libcuda"])
    assert "/usr/local/cuda/compat" in message(report)


def test_rc_032_lost_devices_ask_for_a_new_container(lab):
    lab.machine({"init": {"error": 999}, "gpus": []})

    report = run(lab.plan("single"), Options(Depth(cuda=False)))

    assert (report.exit_code, report.worst()[0].remedy_scope) == (20, "restart_container")


@pytest.mark.parametrize(("count", "code"), [(1, 20), (2, 0), (3, 0)])
def test_rc_038_gpus_of_the_plan_must_be_visible(gate, lab, count, code):
    lab.machine(lab.healthy(count))

    report = gate()

    assert report.exit_code == code
    if code:
        assert "visible: GPU-0" in report.worst()[0].observed


def test_rc_038_two_models_warn_and_another_architecture_is_refused(gate, lab):
    scenario = lab.healthy()
    scenario["gpus"][1]["name"] = "Tesla V100-SXM2-16GB"
    lab.machine(scenario)
    mixed = gate()
    scenario["gpus"][1]["compute_capability"] = 7.5
    lab.machine(scenario)

    assert ids(mixed) == ["gpu.mixed"]
    assert "gpu.cc" in ids(gate())


@pytest.mark.parametrize(("shm", "code"), [(64 * MIB, 12), (2 * GIB, 0)])
def test_rc_065_shared_memory_below_the_plan_is_exit_12(lab, shm, code):
    plan = replace(lab.plan("tp2"), shm_bytes=2 * GIB)
    facts = replace(collect(plan, Depth(cuda=False)), shm_bytes=shm, in_container=True)

    report = run(plan, Options(read=lambda _plan, _depth: facts, names=("container",)))

    assert report.exit_code == code
    if code:
        assert "64 MiB, the plan needs 2048 MiB" in message(report)
