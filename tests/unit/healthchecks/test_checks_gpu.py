"""Checks of one GPU: a passing, a failing and an unreadable case, by plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from healthchecks.facts import (
    EccFacts,
    PcieFacts,
    PowerFacts,
    RetiredFacts,
    ThermalFacts,
)

GIB = 1024**3


def sick(machine, **changes):
    """Return a host whose first GPU differs."""
    return machine.host(machine.gpu(0, **changes), machine.gpu(1))


# One line: check file, id, change of GPU 0, status for single / pp2 / tp2.
GPU_CASES = [
    ("capability", "gpu.cc", {}, "pass pass pass"),
    ("capability", "gpu.cc", {"compute_capability": (6, 0)}, "fail fail fail"),
    ("capability", "gpu.cc", {"compute_capability": None}, "unknown unknown unknown"),
    ("ecc", "ecc.mode", {}, "pass pass pass"),
    ("ecc", "ecc.mode", {"ecc": EccFacts(False, False)}, "fail fail fail"),
    ("ecc", "ecc.mode", {"ecc": EccFacts(True, False, 0, 0, 0, 0)}, "fail fail fail"),
    ("ecc", "ecc.mode", {"ecc": EccFacts(None, None, 0, 0, 0, 0)}, "unknown unknown unknown"),
    ("ecc", "ecc.dbe.volatile", {}, "pass pass pass"),
    ("ecc", "ecc.dbe.volatile", {"ecc": EccFacts(True, True, 0, 1, 0, 1)}, "fail fail fail"),
    (
        "ecc",
        "ecc.dbe.volatile",
        {"ecc": EccFacts(True, True, 0, 0, 0, 0, {"l2": 1})},
        "fail fail fail",
    ),
    (
        "ecc",
        "ecc.dbe.volatile",
        {"ecc": EccFacts(True, True, 0, None, 0, 0)},
        "unknown unknown unknown",
    ),
    ("ecc", "ecc.dbe.growth", {}, "pass pass pass"),
    (
        "ecc",
        "ecc.dbe.growth",
        {"ecc": EccFacts(True, True, 0, 0, 0, None)},
        "unknown unknown unknown",
    ),
    ("ecc", "ecc.dbe.history", {"ecc": EccFacts(True, True, 0, 0, 0, 2)}, "warn warn warn"),
    ("ecc", "ecc.sbe.lifetime", {"ecc": EccFacts(True, True, 0, 0, 100_000, 0)}, "pass pass pass"),
    ("ecc", "ecc.sbe.lifetime", {"ecc": EccFacts(True, True, 0, 0, 100_001, 0)}, "warn warn warn"),
    (
        "ecc",
        "ecc.sbe.lifetime",
        {"ecc": EccFacts(True, True, 0, 0, None, 0)},
        "unknown unknown unknown",
    ),
    ("pages", "mem.pending", {}, "pass pass pass"),
    ("pages", "mem.pending", {"retired": RetiredFacts(1, 0, True, True, False)}, "warn warn warn"),
    ("pages", "mem.pending", {"retired": RetiredFacts(1, 1, True, True, False)}, "warn warn warn"),
    ("pages", "mem.pending", {"retired": RetiredFacts(1, 0, True, False, True)}, "fail fail fail"),
    ("pages", "mem.pending", {"retired": RetiredFacts(1, 1, True)}, "fail fail fail"),
    ("pages", "mem.pending", {"retired": RetiredFacts(2, 0, True)}, "warn warn warn"),
    ("pages", "mem.pending", {"retired": RetiredFacts(None, None, True)}, "fail fail fail"),
    ("pages", "mem.pending", {"retired": RetiredFacts(0, 0, None)}, "unknown unknown unknown"),
    ("pages", "mem.retired_total", {"retired": RetiredFacts(10, 4, False)}, "pass pass pass"),
    ("pages", "mem.retired_total", {"retired": RetiredFacts(10, 5, False)}, "warn warn warn"),
    ("pages", "mem.retired_total", {"retired": RetiredFacts(58, 1, False)}, "warn warn warn"),
    ("pages", "mem.retired_total", {"retired": RetiredFacts(59, 1, False)}, "fail fail fail"),
    (
        "pages",
        "mem.retired_total",
        {"retired": RetiredFacts(None, None, False)},
        "unknown unknown unknown",
    ),
    ("inforom", "inforom.valid", {}, "pass pass pass"),
    ("inforom", "inforom.valid", {"inforom_valid": False}, "fail fail fail"),
    ("inforom", "inforom.valid", {"inforom_valid": None}, "unknown unknown unknown"),
    ("pcie", "pcie.rate", {}, "pass pass pass"),
    ("pcie", "pcie.rate", {"pcie": PcieFacts(8, 16, 3, 3)}, "pass pass warn"),
    ("pcie", "pcie.rate", {"pcie": PcieFacts(4, 4, 3, 3)}, "warn warn fail"),
    ("pcie", "pcie.rate", {"pcie": PcieFacts(1, 1, 3, 3)}, "warn fail fail"),
    ("pcie", "pcie.rate", {"pcie": PcieFacts(16, 16, 1, 3)}, "warn warn fail"),
    ("pcie", "pcie.rate", {"pcie": PcieFacts(16, 16, 1, 3, 16, 3)}, "pass pass pass"),
    ("pcie", "pcie.rate", {"pcie": PcieFacts(None)}, "unknown unknown unknown"),
    ("pcie", "pcie.width_degraded", {}, "pass pass pass"),
    ("pcie", "pcie.width_degraded", {"pcie": PcieFacts(8, 8, 3, 3)}, "pass pass pass"),
    ("pcie", "pcie.width_degraded", {"pcie": PcieFacts(8, 16, 3, 3)}, "warn warn fail"),
    ("pcie", "pcie.width_degraded", {"pcie": PcieFacts(4, 4, 3, 3)}, "warn warn fail"),
    ("pcie", "pcie.width_degraded", {"pcie": PcieFacts(7, 7, 3, 3)}, "warn warn fail"),
    ("pcie", "pcie.width_degraded", {"pcie": PcieFacts(None)}, "unknown unknown unknown"),
    ("pcie", "pcie.replay", {}, "skipped skipped skipped"),
    (
        "pcie",
        "pcie.replay",
        {"pcie": PcieFacts(16, 16, 3, 3, replays_per_min=7.6)},
        "pass pass pass",
    ),
    (
        "pcie",
        "pcie.replay",
        {"pcie": PcieFacts(16, 16, 3, 3, replays_per_min=7.7)},
        "warn warn warn",
    ),
    (
        "pcie",
        "pcie.replay",
        {"pcie": PcieFacts(16, 16, 3, 3, replays_during_load=11)},
        "warn warn warn",
    ),
    (
        "pcie",
        "pcie.replay",
        {"pcie": PcieFacts(16, 16, 3, 3, replays_during_load=10)},
        "pass pass pass",
    ),
    (
        "pcie",
        "pcie.aer",
        {"pcie": PcieFacts(16, 16, 3, 3, aer_correctable_during_load=10, aer_fatal=0)},
        "pass pass pass",
    ),
    ("pcie", "pcie.aer", {}, "pass pass pass"),
    ("pcie", "pcie.aer", {"pcie": PcieFacts(16, 16, 3, 3, aer_fatal=1)}, "fail fail fail"),
    (
        "pcie",
        "pcie.aer",
        {"pcie": PcieFacts(16, 16, 3, 3, aer_correctable_during_load=11)},
        "warn warn warn",
    ),
    (
        "thermal",
        "thermal.gpu",
        {"thermal": ThermalFacts(82, 38, 87, 90, 83, 85, ())},
        "pass pass pass",
    ),
    (
        "thermal",
        "thermal.gpu",
        {"thermal": ThermalFacts(83, 38, 87, 90, 83, 85, ())},
        "warn warn warn",
    ),
    ("thermal", "thermal.gpu", {"thermal": ThermalFacts(None, 38)}, "unknown unknown unknown"),
    (
        "thermal",
        "thermal.hbm",
        {"thermal": ThermalFacts(40, 77, 87, 90, 83, 85, ())},
        "pass pass pass",
    ),
    (
        "thermal",
        "thermal.hbm",
        {"thermal": ThermalFacts(40, 78, 87, 90, 83, 85, ())},
        "warn warn warn",
    ),
    ("thermal", "thermal.hbm", {"thermal": ThermalFacts(40, None)}, "unknown unknown unknown"),
    (
        "thermal",
        "thermal.slowdown",
        {"thermal": ThermalFacts(86, 38, 87, 90, 83, 85, ())},
        "pass pass pass",
    ),
    (
        "thermal",
        "thermal.slowdown",
        {"thermal": ThermalFacts(87, 38, 87, 90, 83, 85, ())},
        "fail fail fail",
    ),
    (
        "thermal",
        "thermal.slowdown",
        {"thermal": ThermalFacts(60, 38, 87, 90, 83, 85, ("hw_thermal_slowdown",))},
        "fail fail fail",
    ),
    (
        "thermal",
        "thermal.slowdown",
        {"thermal": ThermalFacts(60, 38, 87, 90, 83, 85, ("hw_power_brake",))},
        "fail fail fail",
    ),
    (
        "thermal",
        "thermal.slowdown",
        {"thermal": ThermalFacts(60, 38, 87, 90, 83, 85, ("sw_power_cap",))},
        "pass pass pass",
    ),
    ("thermal", "thermal.slowdown", {"thermal": ThermalFacts(None, 38)}, "unknown unknown unknown"),
    ("thermal", "thermal.slowdown", {"thermal": ThermalFacts(40, 38)}, "unknown unknown unknown"),
    (
        "thermal",
        "thermal.idle",
        {"thermal": ThermalFacts(74, 70, 87, 90, 83, 85, ())},
        "pass pass pass",
    ),
    (
        "thermal",
        "thermal.idle",
        {"thermal": ThermalFacts(75, 70, 87, 90, 83, 85, ())},
        "warn warn warn",
    ),
    ("power", "power.limit", {}, "pass pass pass"),
    ("power", "power.limit", {"power": PowerFacts(35.0, 150.0)}, "pass pass pass"),
    ("power", "power.limit", {"power": PowerFacts(35.0, 149.0)}, "warn warn warn"),
    ("power", "power.limit", {"power": PowerFacts(35.0, None)}, "unknown unknown unknown"),
    ("power", "power.read", {}, "pass pass pass"),
    ("power", "power.read", {"power": PowerFacts(None, 250.0, failed_reads=3)}, "warn warn warn"),
    ("persistence", "host.persistence", {}, "pass pass pass"),
    ("persistence", "host.persistence", {"persistence": False}, "warn warn warn"),
    ("persistence", "host.persistence", {"persistence": None}, "unknown unknown unknown"),
    ("busy", "gpu.busy", {}, "pass pass pass"),
    ("busy", "gpu.busy", {"memory_free_bytes": 28 * GIB}, "fail fail fail"),
    ("busy", "gpu.busy", {"process_pids": (4711,)}, "fail fail fail"),
    ("busy", "gpu.busy", {"memory_free_bytes": None}, "unknown unknown unknown"),
    ("busy", "gpu.compute_mode", {}, "pass pass pass"),
    ("busy", "gpu.compute_mode", {"compute_mode": "prohibited"}, "fail fail fail"),
    ("busy", "gpu.compute_mode", {"compute_mode": None}, "unknown unknown unknown"),
    ("cuda", "gpu.alloc", {}, "pass pass pass"),
    (
        "cuda",
        "gpu.alloc",
        {"alloc": "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)"},
        "fail fail fail",
    ),
    ("cuda", "gpu.alloc", {"alloc": None}, "unknown unknown unknown"),
    ("cuda", "gpu.selftest", {"selftest": "ok"}, "pass pass pass"),
    ("cuda", "gpu.selftest", {"selftest": "wrong: at (3, 7)"}, "fail fail fail"),
    (
        "cuda",
        "gpu.selftest",
        {"selftest": "the driver is too old for this library"},
        "unknown unknown unknown",
    ),
    ("presence", "gpu.present", {}, "pass pass pass"),
    (
        "presence",
        "gpu.present",
        {"read_status": {"ecc.volatile_dbe": "gpu_is_lost"}},
        "fail fail fail",
    ),
    (
        "presence",
        "gpu.present",
        {"read_status": {"power.draw_w": "reset_required"}},
        "fail fail fail",
    ),
    ("presence", "gpu.present", {"uuid": "GPU-other"}, "fail fail fail"),
    ("presence", "gpu.mixed", {}, "skipped pass pass"),
    ("presence", "gpu.mixed", {"name": "Tesla V100-PCIE-16GB"}, "skipped warn warn"),
    ("numa", "host.numa", {"numa_node": 0}, "pass pass pass"),
    ("numa", "host.numa", {"numa_node": 1}, "warn warn warn"),
]


@pytest.mark.parametrize(
    ("name", "check", "changes", "statuses"),
    GPU_CASES,
    ids=[f"{c[1]}-{i}" for i, c in enumerate(GPU_CASES)],
)
def test_check_of_gpu_gives_the_status_of_the_plan(machine, name, check, changes, statuses):
    host = replace(sick(machine, **changes), numa_node=0)

    for kind, wanted in zip(("single", "pp2", "tp2"), statuses.split(), strict=True):
        found = machine.judge(name, host, machine.plan(kind)).get(check, "skipped")

        assert found == wanted, kind


@pytest.mark.parametrize(
    ("budget", "limits", "wanted"),
    [
        (None, (250.0, 250.0), None),
        (500.0, (250.0, 250.0), "pass"),
        (499.9, (250.0, 250.0), "fail"),
        (500.0, (250.0, None), "unknown"),
        (200.0, (250.0, None), "fail"),
    ],
)
def test_rc_025_power_limits_are_summed_up_against_the_supply(machine, budget, limits, wanted):
    gpus = [machine.gpu(index, power=PowerFacts(35.0, limit)) for index, limit in enumerate(limits)]
    plan = machine.plan("tp2", {"psu_budget_w": budget})

    found = machine.judge("power", machine.host(*gpus), plan)

    assert found.get("power.budget") == wanted
