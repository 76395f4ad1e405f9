"""Checks of hosts, pairs and logs: every status by plan and policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from healthchecks.facts import (
    KernelFacts,
    LinkFacts,
    PcieFacts,
    PowerFacts,
    XidFacts,
)
from healthchecks.registry import CHECKS, run_checks
from healthchecks.result import Status

MIB = 1024**2
GIB = 1024**3


def sick(machine, **changes):
    """Return a host whose first GPU differs."""
    return machine.host(machine.gpu(0, **changes), machine.gpu(1))


XID_CASES = [
    (48, "fail"),
    (62, "fail"),
    (64, "fail"),
    (79, "fail"),
    (94, "fail"),
    (95, "fail"),
    (63, "warn"),
    (92, "warn"),
]
XID_CASES += [
    (93, "warn"),
    (32, "warn"),
    (38, "warn"),
    (56, "warn"),
    (58, "warn"),
    (68, "warn"),
    (69, "warn"),
    (74, "warn"),
]
XID_CASES += [(13, "pass"), (31, "pass"), (43, "pass"), (45, "pass"), (154, "pass"), (171, "pass")]


@pytest.mark.parametrize(("xid", "wanted"), XID_CASES)
def test_xid_on_the_plans_gpu_has_its_severity(machine, xid, wanted):
    host = machine.host(kernel=KernelFacts("read", (XidFacts(xid, 0),)))

    assert machine.judge("xid", host, machine.plan("tp2"))[f"xid.{xid}"] == wanted


def test_xid_on_another_gpu_is_not_this_plans(machine):
    host = machine.host(kernel=KernelFacts("read", (XidFacts(79, 1),)))

    assert "xid.79" not in machine.judge("xid", host, machine.plan("single"))


def test_xid_74_on_an_nvlink_path_refuses(machine):
    host = machine.host(
        pairs=(machine.pair(nvlink_lanes=2),), kernel=KernelFacts("read", (XidFacts(74, 0),))
    )

    assert machine.judge("xid", host, machine.plan("tp2"))["xid.74"] == "fail"


def test_xid_log_unavailable_is_said_and_skipped(machine):
    host = machine.host(kernel=KernelFacts("unavailable"))

    assert machine.judge("xid", host, machine.plan("single")) == {"xid.log": "skipped"}


SILENT = dict.fromkeys(("read_ab", "read_ba", "write_ab", "write_ba"))
REFUSED = dict.fromkeys(SILENT, "NOT_SUPPORTED")
# change of the pair, then pair.p2p/pair.functional for pp2, tp2 require, tp2 auto.
PAIR_CASES = [
    ({}, "pass/pass pass/pass pass/pass"),
    (
        {"read_ab": "CHIPSET_NOT_SUPPORTED", "functional": "no_access"},
        "warn/skipped fail/skipped warn/skipped",
    ),
    (REFUSED | {"functional": "no_access"}, "pass/skipped fail/skipped warn/skipped"),
    (SILENT | {"functional": None}, "unknown/unknown unknown/unknown warn/unknown"),
    ({"functional": "hang"}, "pass/warn pass/fail pass/warn"),
    ({"functional": "crash"}, "pass/warn pass/fail pass/warn"),
    ({"functional": "mismatch"}, "pass/warn pass/fail pass/warn"),
    ({"functional": "error"}, "pass/warn pass/fail pass/warn"),
]


@pytest.mark.parametrize(("changes", "statuses"), PAIR_CASES)
def test_pair_gives_the_status_of_plan_and_policy(machine, changes, statuses):
    host = machine.host(pairs=(machine.pair(**changes),))
    plans = [("pp2", "auto"), ("tp2", "require"), ("tp2", "auto")]

    for (kind, policy), wanted in zip(plans, statuses.split(), strict=True):
        plan = machine.plan(kind, {"p2p": {"policy": policy}})
        p2p = machine.judge("p2p", host, plan)["pair.p2p"]
        functional = machine.judge("functional", host, plan)["pair.functional"]

        assert f"{p2p}/{functional}" == wanted, (kind, policy)


@pytest.mark.parametrize("changes", [{}, REFUSED, SILENT])
def test_pair_without_p2p_by_policy_passes_whatever_the_driver_says(machine, changes):
    host = machine.host(pairs=(machine.pair(**changes, functional=None),))
    plan = machine.plan("tp2", {"p2p": {"policy": "off"}})

    assert machine.judge("p2p", host, plan)["pair.p2p"] == "pass"
    assert machine.judge("functional", host, plan)["pair.functional"] == "skipped"


def test_pair_functional_proves_access_that_nvml_does_not_show(machine):
    silent = dict.fromkeys(("read_ab", "read_ba", "write_ab", "write_ba"))
    host = machine.host(pairs=(machine.pair(**silent, functional="ok"),))

    assert (
        machine.judge("p2p", host, machine.plan("tp2", {"p2p": {"policy": "require"}}))["pair.p2p"]
        == "pass"
    )


@pytest.mark.parametrize(
    ("with_p2p", "without", "require", "auto"),
    [
        ("ok", "ok", "pass", "pass"),
        ("hang", "ok", "fail", "warn"),
        ("crash", "crash", "fail", "fail"),
        (None, "hang", "fail", "fail"),
    ],
)
def test_pair_collective_refuses_when_it_fails_without_p2p_too(
    machine, with_p2p, without, require, auto
):
    host = machine.host(pairs=(machine.pair(collective=with_p2p, collective_no_p2p=without),))

    for policy, wanted in (("require", require), ("auto", auto)):
        plan = machine.plan("tp2", {"p2p": {"policy": policy}})

        assert machine.judge("functional", host, plan)["pair.collective"] == wanted


@pytest.mark.parametrize(("lanes", "wanted"), [(0, "fail"), (2, "pass")])
def test_pair_custom_all_reduce_needs_nvlink(machine, lanes, wanted):
    host = machine.host(pairs=(machine.pair(nvlink_lanes=lanes),))
    plan = machine.plan("tp2", custom_all_reduce=True)

    assert machine.judge("p2p", host, plan)["pair.custom_all_reduce"] == wanted


@pytest.mark.parametrize(
    ("topology", "lanes", "pp2", "tp2"),
    [
        ("PHB", 0, "pass", "pass"),
        ("SYS", 0, "pass", "warn"),
        ("SYS", 2, "pass", "pass"),
        (None, 0, "unknown", "unknown"),
    ],
)
def test_pair_topology_by_plan(machine, topology, lanes, pp2, tp2):
    host = machine.host(pairs=(machine.pair(topology=topology, nvlink_lanes=lanes),))

    assert machine.judge("topology", host, machine.plan("pp2"))["pair.topology"] == pp2
    assert machine.judge("topology", host, machine.plan("tp2"))["pair.topology"] == tp2


@pytest.mark.parametrize(
    ("policy", "wanted"), [("require", "fail"), ("auto", "warn"), ("off", "pass")]
)
def test_pair_nvlink_with_a_dead_lane_by_policy(machine, policy, wanted):
    lanes = (LinkFacts(0, active=True), LinkFacts(1, active=False))
    host = sick(machine, links=lanes)

    assert (
        machine.judge("nvlink", host, machine.plan("tp2", {"p2p": {"policy": policy}}))[
            "pair.nvlink"
        ]
        == wanted
    )
    assert machine.judge("nvlink", host, machine.plan("pp2"))["pair.nvlink"] == "pass"


def test_pair_nvlink_on_pcie_boards_is_skipped(machine):
    assert machine.judge("nvlink", machine.host(), machine.plan("tp2"))["pair.nvlink"] == "skipped"


@pytest.mark.parametrize(
    ("per_s", "lanes", "wanted"), [(99.0, 2, "warn"), (100.0, 2, "fail"), (100.0, 0, "warn")]
)
def test_nvlink_errors_refuse_only_as_a_storm_on_the_path(machine, per_s, lanes, wanted):
    links = (LinkFacts(0, active=True, crc_errors=500, crc_per_s=per_s),)
    host = replace(sick(machine, links=links), pairs=(machine.pair(nvlink_lanes=lanes),))

    assert machine.judge("nvlink", host, machine.plan("tp2"))["nvlink.errors"] == wanted


def test_nvlink_errors_without_errors_pass(machine):
    links = (LinkFacts(0, active=True, crc_errors=0, replays=0, recoveries=0),)

    assert (
        machine.judge("nvlink", sick(machine, links=links), machine.plan("tp2"))["nvlink.errors"]
        == "pass"
    )


def test_pcie_rate_of_tensor_parallel_over_nvlink_is_that_of_one_gpu(machine):
    host = replace(sick(machine, pcie=PcieFacts(8, 8, 3, 3)), pairs=(machine.pair(nvlink_lanes=2),))

    assert machine.judge("pcie", host, machine.plan("tp2"))["pcie.rate"] == "pass"


DRIVER_CASES = [
    ("450.80.02", "warn"),
    ("450.51.05", "fail"),
    ("384.145", "fail"),
    ("520.61.05", "pass"),
    ("520.56.06", "warn"),
    ("580.95.05", "pass"),
    ("570.x", "pass"),
    ("580", "pass"),
    ("450", "warn"),
    (None, "unknown"),
]


@pytest.mark.parametrize(("version", "wanted"), DRIVER_CASES)
def test_driver_minimum(machine, version, wanted):
    assert (
        machine.judge("driver", machine.host(driver_version=version), machine.plan("single"))[
            "driver.min"
        ]
        == wanted
    )


@pytest.mark.parametrize(
    ("version", "wanted"), [("525.60.13", "pass"), ("525.60.12", "fail"), ("470.256.02", "fail")]
)
def test_driver_of_the_engine(machine, version, wanted):
    plan = machine.plan("single", driver_min=(525, 60, 13))

    assert (
        machine.judge("driver", machine.host(driver_version=version), plan)["driver.engine"]
        == wanted
    )


def test_driver_library_that_is_hidden_refuses(machine):
    host = machine.host(shadowing_libcuda="/usr/local/cuda/compat/libcuda.so.520.61.05")

    assert machine.judge("driver", host, machine.plan("single"))["driver.libcuda"] == "fail"


@pytest.mark.parametrize(
    "state",
    ["driver_not_loaded", "library_not_found", "version_mismatch", "no_permission", "error:77"],
)
def test_nvml_that_does_not_open_refuses(machine, state):
    assert (
        machine.judge("nvml", machine.host(nvml=state), machine.plan("single"))["nvml.init"]
        == "fail"
    )


def test_nvml_that_is_late_is_unknown(machine):
    assert machine.judge("nvml", machine.host(nvml="timeout"), machine.plan("single")) == {
        "nvml.timeout": "unknown"
    }


def test_nvml_with_a_silent_gpu_is_unknown(machine):
    host = sick(machine, read_status={"*": "timeout"})

    assert machine.judge("nvml", host, machine.plan("single"))["nvml.timeout"] == "unknown"


def test_nvml_with_a_process_that_cannot_be_killed_refuses(machine):
    assert (
        machine.judge("nvml", machine.host(wedged_pids=(4711,)), machine.plan("single"))[
            "nvml.wedged"
        ]
        == "fail"
    )


@pytest.mark.parametrize(("expected", "wanted"), [(2, "pass"), (3, "warn")])
def test_host_gpu_count(machine, expected, wanted):
    plan = machine.plan("single", {"expected_gpus": expected})

    assert machine.judge("presence", machine.host(), plan)["host.gpu_count"] == wanted


def test_host_gpu_on_the_bus_and_not_with_the_driver_warns(machine):
    assert (
        machine.judge("presence", machine.host(pci_gpus=3), machine.plan("single"))[
            "host.gpu_unlinked"
        ]
        == "warn"
    )


@pytest.mark.parametrize(
    ("shm", "inside", "kind", "wanted"),
    [
        (16 * GIB, True, "tp2", "pass"),
        (64 * MIB, True, "tp2", "fail"),
        (64 * MIB, True, "single", "warn"),
        (4 * GIB, True, "tp2", "fail"),
        (4 * GIB, False, "tp2", "pass"),
        (512 * MIB, False, "tp2", "fail"),
    ],
)
def test_host_shm_against_the_plan(machine, shm, inside, kind, wanted):
    host = machine.host(shm_bytes=shm, in_container=inside)

    assert machine.judge("container", host, machine.plan(kind))["host.shm"] == wanted


@pytest.mark.parametrize(("available", "wanted"), [(14 * GIB, "pass"), (14 * GIB - 1, "fail")])
def test_host_memory_holds_a_shard_a_rank_and_4_gib(machine, available, wanted):
    host = machine.host(memory_available_bytes=available, largest_shard_bytes=5 * GIB)

    assert machine.judge("container", host, machine.plan("tp2"))["host.memory"] == wanted


@pytest.mark.parametrize(("lanes", "wanted"), [(2, "warn"), (0, "pass")])
def test_host_environment_names_a_stale_work_around(machine, lanes, wanted):
    host = machine.host(
        pairs=(machine.pair(nvlink_lanes=lanes),), environment={"NCCL_P2P_DISABLE": "1"}
    )

    assert machine.judge("environment", host, machine.plan("tp2"))["host.environment"] == wanted


@pytest.mark.parametrize(
    ("stalled", "busy", "watts", "wanted"),
    [
        (60.0, 100, 47.0, "fail"),
        (59.0, 100, 47.0, "pass"),
        (60.0, 99, 47.0, "pass"),
        (60.0, 100, 60.0, "pass"),
    ],
)
def test_engine_spin_needs_all_three_marks(machine, stalled, busy, watts, wanted):
    gpus = [
        machine.gpu(i, utilization_percent=busy, power=PowerFacts(watts, 250.0)) for i in (0, 1)
    ]
    host = machine.host(*gpus, stalled_s=stalled)

    assert machine.judge("spin", host, machine.plan("tp2"))["engine.spin"] == wanted


def test_gpu_locked_by_another_appliance_refuses(machine):
    host = machine.host(holders={"GPU-0": "pid 7 on box"})

    assert machine.judge("busy", host, machine.plan("single"))["gpu.locked"] == "fail"


def test_uvm_missing_is_named_when_cuda_fails(machine):
    host = replace(sick(machine, alloc="cuInit: CUDA_ERROR_UNKNOWN (999)"), uvm_node=False)

    result = next(iter(run_checks(machine.context(host, machine.plan("single")), ["cuda"])))

    assert result.status is Status.FAIL
    assert "nvidia-uvm is absent" in result.message


def test_every_check_on_a_healthy_machine_passes_or_is_skipped(machine):
    for kind in ("single", "pp2", "tp2"):
        results = run_checks(machine.context(machine.host(), machine.plan(kind)))

        assert {result.status for result in results} <= {Status.PASS, Status.SKIPPED}
    assert len(CHECKS) == 23
