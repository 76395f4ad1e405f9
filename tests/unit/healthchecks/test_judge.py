"""From judgements to a verdict: overrides, unknown evidence, launch adjustments, the report."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from datetime import date, timedelta

import pytest

from appliance.gate.defaults import plain_section
from healthchecks.context import Evidence
from healthchecks.facts import EccFacts, KernelFacts, PcieFacts, RetiredFacts, XidFacts
from healthchecks.judge import judge, without_measuring
from healthchecks.policy import PolicyError, policy_of
from healthchecks.result import Status

TODAY = date(2026, 11, 29)
DBE = EccFacts(True, True, 0, 2, 0, 2)


def override(check="ecc.dbe.volatile", **changes):
    base = {
        "check": check,
        "gpu": "GPU-0",
        "reason": "replacement is ordered",
        "by": "ops",
        "until": (TODAY + timedelta(days=5)).isoformat(),
        "bound": 2,
    }
    return base | changes


def report_of(machine, host, kind="single", gate=None, **changes):
    return judge(machine.context(host, machine.plan(kind, gate, **changes)))


def test_healthy_machine_passes_with_every_plan(machine):
    for kind in ("single", "pp2", "tp2"):
        report = report_of(machine, machine.host(), kind)

        assert (report.verdict, report.exit_code, report.launch.env) == ("pass", 0, {})


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "warn"),
        ({"bound": 1}, "fail"),
        ({"until": (TODAY - timedelta(days=1)).isoformat()}, "fail"),
        ({"until": (TODAY + timedelta(days=30)).isoformat()}, "warn"),
        ({"until": (TODAY + timedelta(days=31)).isoformat()}, "fail"),
        ({"gpu": "GPU-1"}, "fail"),
        ({"check": "ecc.mode"}, "fail"),
    ],
)
def test_override_holds_for_its_check_gpu_day_and_bound_only(machine, changes, wanted):
    host = machine.host(machine.gpu(0, ecc=DBE), machine.gpu(1))

    report = report_of(machine, host, gate={"overrides": [override(**changes)]})

    assert report.verdict == wanted
    assert len(report.overrides) == (wanted == "warn")
    if wanted == "warn":
        assert next(r for r in report.checks if r.overridden_by).id == "ecc.dbe.volatile"


@pytest.mark.parametrize(
    ("changes", "kernel", "check"),
    [
        ({"retired": RetiredFacts(0, 1, True, False, True)}, KernelFacts("read"), "mem.pending"),
        ({"compute_capability": (6, 0)}, KernelFacts("read"), "gpu.cc"),
        ({}, KernelFacts("read", (XidFacts(79, 0),)), "xid.79"),
        ({}, KernelFacts("read", (XidFacts(64, 0),)), "xid.64"),
    ],
)
def test_override_of_a_fixed_check_does_not_hold(machine, changes, kernel, check):
    host = machine.host(machine.gpu(0, **changes), machine.gpu(1), kernel=kernel)

    report = report_of(machine, host, gate={"overrides": [override(check, bound=99)]})

    assert report.exit_code == 20
    assert "gate.override" in [result.id for result in report.worst()]


def test_unknown_evidence_refuses_unless_allowed(machine):
    host = machine.host(machine.gpu(0, inforom_valid=None), machine.gpu(1))

    assert (report_of(machine, host).verdict, report_of(machine, host).exit_code) == ("unknown", 21)
    assert report_of(machine, host, gate={"on_unknown": "allow"}).verdict == "warn"


def test_unknown_of_a_fixed_check_is_never_allowed(machine):
    report = report_of(machine, machine.host(nvml="timeout"), gate={"on_unknown": "allow"})

    assert (report.verdict, report.exit_code) == ("unknown", 21)


def test_unknown_of_a_soft_check_only_warns(machine):
    host = machine.host(machine.gpu(0, persistence=None), machine.gpu(1))

    assert (report_of(machine, host).verdict, report_of(machine, host).exit_code) == ("warn", 0)


def test_fail_outranks_unknown(machine):
    host = machine.host(machine.gpu(0, inforom_valid=None, ecc=DBE), machine.gpu(1))

    assert report_of(machine, host).exit_code == 20


@pytest.mark.parametrize(
    ("state", "code"),
    [("driver_not_loaded", 11), ("library_not_found", 11), ("unknown_error", 20), ("timeout", 21)],
)
def test_nvml_that_does_not_open_has_its_exit_code(machine, state, code):
    assert report_of(machine, machine.host(nvml=state, gpus=(), pairs=())).exit_code == code


def test_container_limit_alone_has_its_exit_code(machine):
    small = machine.host(shm_bytes=64 * 1024**2)
    sick = replace(small, gpus=(machine.gpu(0, ecc=DBE), machine.gpu(1)))

    assert report_of(machine, small, "tp2").exit_code == 12
    assert report_of(machine, sick, "tp2").exit_code == 20


def test_mode_warn_reports_the_fault_and_starts(machine):
    host = machine.host(machine.gpu(0, ecc=DBE), machine.gpu(1))

    report = report_of(machine, host, gate={"mode": "warn"})

    assert (report.verdict, report.exit_code) == ("warn", 0)
    assert {"ecc.dbe.volatile", "gate.mode"} <= {result.id for result in report.worst()}


def test_mode_off_and_the_cpu_engine_measure_nothing(machine):
    off = without_measuring(machine.plan("single", {"mode": "off"}))
    cpu = without_measuring(machine.plan("single", uuids=(), uses_gpu=False))

    assert (off.verdict, off.worst()[0].id) == ("warn", "gate.mode")
    assert (cpu.verdict, cpu.exit_code) == ("pass", 0)
    assert {result.message for result in cpu.checks} == {"skipped: the plan uses no GPU"}


# change of the pair, plan, policy, then env, args
LAUNCHES = [
    ({}, "tp2", "auto", {}, ()),
    (
        {"read_ab": "NOT_SUPPORTED"},
        "tp2",
        "auto",
        {"NCCL_P2P_DISABLE": "1"},
        ("--disable-custom-all-reduce",),
    ),
    ({"read_ab": "NOT_SUPPORTED"}, "pp2", "auto", {}, ()),
    (
        {"functional": "hang"},
        "tp2",
        "auto",
        {"NCCL_P2P_DISABLE": "1"},
        ("--disable-custom-all-reduce",),
    ),
    ({"functional": "hang"}, "pp2", "auto", {"NCCL_P2P_DISABLE": "1"}, ()),
    (
        {"functional": "mismatch"},
        "tp2",
        "auto",
        {"NCCL_P2P_DISABLE": "1", "VLLM_SKIP_P2P_CHECK": "0"},
        ("--disable-custom-all-reduce",),
    ),
    (
        {"functional": "hang", "custom_all_reduce_only": True},
        "tp2",
        "auto",
        {},
        ("--disable-custom-all-reduce",),
    ),
    ({"functional": "hang", "custom_all_reduce_only": True}, "pp2", "auto", {}, ()),
    (
        {"functional": None},
        "tp2",
        "off",
        {"NCCL_P2P_DISABLE": "1"},
        ("--disable-custom-all-reduce",),
    ),
    (
        {"collective": "hang", "collective_no_p2p": "ok"},
        "tp2",
        "auto",
        {"NCCL_P2P_DISABLE": "1"},
        ("--disable-custom-all-reduce",),
    ),
]


@pytest.mark.parametrize("case", LAUNCHES)
def test_launch_carries_the_flags_and_the_measurement_behind_them(machine, case):
    changes, kind, policy, env, args = case
    host = machine.host(pairs=(machine.pair(**changes),))

    report = report_of(machine, host, kind, {"p2p": {"policy": policy}})

    assert (dict(report.launch.env), report.launch.args) == (env, args)
    assert bool(report.launch.reasons) == bool(env or args)
    assert all("pair." in reason for reason in report.launch.reasons)


@pytest.mark.parametrize(
    ("changes", "kind", "wanted"),
    [
        ({"pcie": PcieFacts(4, 4, 3, 3)}, "tp2", "pp2"),
        ({"ecc": DBE}, "tp2", "single"),
        ({"ecc": DBE}, "single", None),
        ({}, "tp2", None),
    ],
)
def test_another_plan_is_suggested_where_it_would_start(machine, changes, kind, wanted):
    host = machine.host(machine.gpu(0, **changes), machine.gpu(1))

    assert report_of(machine, host, kind).launch.suggested_plan == wanted


def test_report_fits_the_published_schema(machine, samples):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((samples / "schema" / "report.schema.json").read_text())
    sick = machine.host(machine.gpu(0, ecc=DBE, read_status={"x": "not_supported"}), machine.gpu(1))
    reports = [
        report_of(machine, sick, "tp2", {"overrides": [override()]}),
        report_of(machine, machine.host(nvml="driver_not_loaded", gpus=(), pairs=())),
        report_of(machine, machine.host(), "pp2"),
        without_measuring(machine.plan("single", uuids=(), uses_gpu=False)),
        without_measuring(machine.plan("single", {"mode": "off"})),
    ]

    for report in reports:
        jsonschema.validate(json.loads(report.to_json()), schema)
    assert json.loads(reports[0].to_json())["overrides_applied"][0]["by"] == "ops"


def test_report_names_no_serial(machine):
    host = machine.host(machine.gpu(0, serial="0123456789"), machine.gpu(1))

    assert "0123456789" not in report_of(machine, host).to_json()


@pytest.mark.parametrize("evidence", list(Evidence))
def test_missing_value_that_a_read_refused_is_unknown_whatever_the_evidence(machine, evidence):
    gpu = machine.gpu(0, inforom_valid=None, read_status={"inforom_valid": "error:999"})
    context = machine.context(
        machine.host(gpu, machine.gpu(1)), machine.plan("single"), evidence=evidence
    )

    assert judge(context).verdict is Status.UNKNOWN


@pytest.mark.parametrize(
    "change",
    [
        lambda gate: gate.pop("timeout"),
        lambda gate: gate.update(timeout="20s"),
        lambda gate: gate.update(ecc=None),
        lambda gate: gate["ecc"].update(require_enabled=1),
        lambda gate: gate["pcie"].update(min_width=True),
        lambda gate: gate.update(overrides=[{"check": "x"}]),
        lambda gate: gate.update(overrides=[override(until="soon")]),
        lambda gate: gate.update(overrides="none"),
        lambda gate: gate.update(mode=None),
    ],
    ids=range(9),
)
def test_policy_that_is_not_whole_is_refused(change):
    gate = deepcopy(dict(plain_section()))
    change(gate)

    with pytest.raises(PolicyError, match=r"^gate\."):
        policy_of(gate)


@pytest.mark.parametrize(("bound", "wanted"), [(4, "warn"), (3, "fail")])
def test_override_of_a_value_where_less_is_worse_bounds_what_is_missing(machine, bound, wanted):
    host = machine.host(machine.gpu(0, pcie=PcieFacts(12, 16, 3, 3)), machine.gpu(1))
    gate = {"overrides": [override("pcie.width_degraded", bound=bound)]}

    assert report_of(machine, host, "tp2", gate).verdict == wanted
