"""Records with parts that cannot be read: refused, or unknown, and never a healthy card."""

from __future__ import annotations

import json

import pytest

from healthchecks.sample import SampleError
from healthchecks.simulate import load_state, record_text


def broken(record, *path, value):
    item = record
    for key in path[:-1]:
        item = item[key]
    item[path[-1]] = value
    return json.dumps(record)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("host",), None, "not a whole record"),
        (("gpus",), "abc", "not a whole record"),
        (("gpus", 0), None, "not a whole record"),
        (("gpus", 0, "ecc"), "abc", "not a whole record"),
        (("gpus", 0, "ecc", "aggregate_dbe"), "3", "aggregate_dbe"),
        (("gpus", 0, "ecc", "aggregate_dbe"), -5, "aggregate_dbe: -5 cannot be"),
        (("gpus", 0, "ecc", "aggregate_dbe"), float("nan"), "NaN is no number"),
        (("gpus", 0, "ecc", "aggregate_sbe"), float("inf"), "Infinity is no number"),
        (("gpus", 0, "pcie", "width_current"), [], "width"),
        (("gpus", 0, "power_w", "limit"), 1e300, "limit_w"),
        (("gpus", 1, "index"), 0, "listed twice"),
        (("plan_gpus",), [0, 0], "listed twice"),
    ],
)
def test_record_with_a_value_that_cannot_be_is_refused(record, tmp_path, path, value, words):
    file = tmp_path / "record.json"
    file.write_text(broken(record, *path, value=value))

    with pytest.raises(SampleError, match=words):
        load_state(file)


@pytest.mark.parametrize("value", ["N/A", "Pending", 1, [], {}, 0.0, ""])
@pytest.mark.parametrize(
    ("section", "key"),
    [("retired", "pending"), ("ecc", "mode_current"), ("ecc", "mode_pending")],
)
def test_flag_that_says_neither_yes_nor_no_is_refused(record, tmp_path, section, key, value):
    file = tmp_path / "record.json"
    file.write_text(broken(record, "gpus", 1, section, key, value=value))

    with pytest.raises(SampleError) as refused:
        load_state(file)

    words = f"gpus[1].{section}.{key} is {json.dumps(value)}, must be Yes, No"
    assert words in str(refused.value)


@pytest.mark.parametrize("value", ["Yes", "yes", True])
def test_pending_page_counts_in_every_spelling(record, verdicts, value):
    record["gpus"][0]["retired"].update(pending=value, dbe=1)

    assert verdicts(record) == "fail fail fail fail"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("host", "driver_loaded"), "No", "host.driver_loaded is"),
        (("host", "driver_loaded"), 0, "host.driver_loaded is 0"),
        (("host", "driver"), "unknown", "a driver version"),
        (("host", "driver"), 535, "a driver version"),
        (("host", "gpus_expected"), "2", "a whole number"),
        (("gpus", 0, "index"), True, "a whole number"),
        (("gpus", 0, "index"), None, "index is null"),
        (("gpus", 0, "compute_capability"), "seven", "a compute capability"),
        (("gpus", 0, "persistence"), "N/A", "persistence is"),
        (("gpus", 0, "memory_used_mib"), "12", "a whole number"),
        (("gpus", 0, "clock_reasons_active"), "hw_thermal_slowdown", "must be a list"),
        (("gpus", 0, "clock_reasons_active"), ["HW Thermal"], "the name of a clock-limit"),
        (("gpus", 0, "nvlink"), [{"link": 0, "active": "No"}], "must be true or false"),
        (("gpus", 0, "nvlink"), [{"link": 0}], "active is missing"),
        (("gpus", 0, "read_errors"), {"pendng": "N/A"}, "pendng is no part of a record"),
        (("gpus", 0, "read_errors"), {"pending": None}, "must be text"),
        (("gpus", 0, "retired"), {"pendng": "Yes"}, "is pending meant"),
        (("gpus", 0, "retired"), [], "must be an object"),
        (("gpus", 0, "retires"), {}, "is retired meant"),
        (("pairs",), {}, "must be a list"),
        (("pairs", 0, "p2p_read"), 1, "a status or an object"),
        (("pairs", 0, "p2p_read"), {}, "a status or an object"),
        (("pairs", 0, "topology"), "sys", "PIX"),
        (("pairs", 0, "nvlink_lanes"), "6", "a whole number"),
        (("pairs", 0, "functional_copy"), False, "text or null"),
        (("pairs", 0, "b"), 0, "one GPU with itself"),
        (("kernel", "xids"), [{"xid": "79", "gpu": 0}], "a whole number"),
        (("kernel", "xids"), [{"gpu": 0}], "xid is missing"),
        (("kernel", "xid"), [{"xid": 79}], "is xids meant"),
        (("behaviour",), "NVML queries block", "must be a list"),
        (("behaviour",), ["replays +400 in 0 s"], "not a whole record"),
        (("verdict_presumes",), True, "text or null"),
        (("plan_gpus",), ["0"], "a whole number"),
        (("kernels",), {}, "is kernel meant"),
    ],
)
def test_part_that_cannot_be_read_is_never_a_healthy_one(record, tmp_path, path, value, words):
    file = tmp_path / "record.json"
    file.write_text(broken(record, *path, value=value))

    with pytest.raises(SampleError) as refused:
        load_state(file)

    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("section", "part", "single"),
    [
        ("retired", "pending", "unknown"),
        ("ecc", "volatile_dbe", "unknown"),
        ("pcie", "width_current", "warn"),  # one GPU does without: its severity is soft
    ],
)
def test_value_that_a_tool_could_not_read_is_unknown_by_its_own_name(
    record, verdicts, section, part, single
):
    record["gpus"][0][section][part] = None
    record["gpus"][0]["read_errors"] = {f"{section}.{part}": "N/A"}

    assert verdicts(record) == f"{single} unknown unknown unknown"


@pytest.mark.parametrize("key", ["retired.pending", "pending", "ecc.volatile_dbe", "volatile_dbe"])
def test_value_beside_its_own_read_error_is_no_evidence(record, verdicts, key):
    gpu = record["gpus"][0]
    assert (gpu["retired"]["pending"], gpu["ecc"]["volatile_dbe"]) == ("No", 0)
    gpu["read_errors"] = {key: "N/A"}

    assert verdicts(record) == "unknown unknown unknown unknown"


def test_name_that_is_there_twice_is_refused(record, tmp_path):
    file = tmp_path / "record.json"
    text = json.dumps(record)
    file.write_text(text.replace('"pending": "No"', '"pending": "Yes", "pending": "No"', 1))

    with pytest.raises(SampleError, match="pending is there twice"):
        load_state(file)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("gpus", 0, "compute_mode"), "Prohibited", "compute_mode is"),
        (("gpus", 0, "retired", "pending"), "No", "pending: bool is needed"),
        (("gpus", 0, "retired", "pendng"), True, "facts.gpus[0].retired.pendng is no part"),
        (("gpus", 0, "thermal", "reasons"), ["HW Slowdown"], "reasons is"),
        (("pairs", 0, "collective"), "Hang", "collective is"),
        (("pairs", 0, "topology"), "sys", "topology is"),
        (("kernel", "log"), "Read", "log is"),
        (("kernel",), None, "kernel: KernelFacts is needed"),
        (("nvml",), None, "nvml"),
    ],
)
def test_recorded_state_with_a_word_that_no_machine_gives_is_refused(
    machine, tmp_path, path, value, words
):
    record = json.loads(record_text(machine.host(), machine.plan("tp2")))
    file = tmp_path / "state.json"
    file.write_text(broken(record, "facts", *path, value=value))

    with pytest.raises(SampleError) as refused:
        load_state(file)

    assert words in str(refused.value)


@pytest.mark.parametrize("part", ["nvml", "kernel", "wedged_pids", "gpus"])
def test_recorded_state_that_lacks_a_part_is_not_filled_up(machine, tmp_path, part):
    record = json.loads(record_text(machine.host(), machine.plan("tp2")))
    del record["facts"][part]
    file = tmp_path / "state.json"
    file.write_text(json.dumps(record))

    with pytest.raises(SampleError, match=f"facts.{part} is missing"):
        load_state(file)
