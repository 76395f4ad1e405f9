"""Records as people wrote them: spellings, one-way access, what a copy did, plain statements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from healthchecks.context import Evidence
from healthchecks.sample import SampleError, facts_of_sample
from healthchecks.simulate import load_state, record_text


def test_record_with_nothing_wrong_passes(record, verdicts):
    assert verdicts(record) == "pass pass pass pass"
    assert verdicts(record, Evidence.STRICT) == "pass pass pass pass"


@pytest.mark.parametrize(
    "ways",
    [
        {"0->1": "OK", "1->0": "NS"},
        {"a_to_b": "OK", "b_to_a": "CNS"},
        {"ab": "OK", "ba": "NOT_SUPPORTED"},
        {"GPU0-GPU1": "OK", "GPU1-GPU0": "NS"},
        {"first": "OK", "second": "NS"},
    ],
)
def test_one_way_access_is_read_in_every_spelling(record, verdicts, ways):
    record["pairs"][0].update(p2p_read=ways, p2p_write=ways, functional_copy=None)

    pair = facts_of_sample(record)[0].pairs[0]

    assert pair.read_ab == "OK"
    assert pair.read_ba != "OK"
    assert verdicts(record) == "pass warn fail warn"


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("ok", "ok"),
        ("passed", "ok"),
        ("hang", "hang"),
        ("hang in custom all-reduce", "hang"),
        ("timeout after 60 s", "hang"),
        ("segfault in libcuda", "crash"),
        ("killed by signal 11", "crash"),
        ("wrong data", "mismatch"),
        ("sum of ones is 0", "mismatch"),
        ("not tested", None),
        (None, None),
    ],
)
def test_what_a_copy_did_is_sorted(record, text, outcome):
    record["pairs"][0]["functional_copy"] = text

    assert facts_of_sample(record)[0].pairs[0].functional == outcome


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("wrong data", "pass warn fail warn"), ("hang in custom all-reduce", "pass pass fail warn")],
)
def test_broken_copy_outranks_the_drivers_word(record, verdicts, text, wanted):
    record["pairs"][0]["functional_copy"] = text

    assert verdicts(record) == wanted


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("loaded_gen=1", "warn warn fail fail"),
        ("NVML queries block", "fail fail fail fail"),
        ("nvidia-smi hangs for ever", "fail fail fail fail"),
        ("replays +400 in 60 s", "warn warn warn warn"),
        ("replays +7 in 60 s", "pass pass pass pass"),
        ("new CUDA context on GPU 0 refused", "fail fail fail fail"),
        ("new CUDA context on GPU 1 refused", "pass fail fail fail"),
        ("process runs on the remote NUMA node", "warn warn warn warn"),
        ("600 s burn-in without error", "pass pass pass pass"),
    ],
)
def test_plain_statements_count_and_prose_does_not(record, verdicts, said, wanted):
    record["behaviour"] = [said]

    assert verdicts(record) == wanted


def test_idle_generation_of_a_record_says_nothing_and_a_busy_one_does(record, verdicts):
    for gpu in record["gpus"]:
        gpu["pcie"]["gen_current"] = 1
    assert verdicts(record) == "pass pass pass pass"

    for gpu in record["gpus"]:
        gpu["util_gpu_pct"] = 98

    assert verdicts(record) == "warn warn fail fail"


def test_driver_that_is_not_loaded_refuses_every_plan(record, verdicts):
    record["host"].update(driver_loaded=False, driver=None)
    record.update(gpus=[], plan_gpus=[], pairs=[])

    assert verdicts(record) == "fail fail fail fail"


def test_card_that_is_judged_as_if_it_were_a_volta_is(record, verdicts):
    for gpu in record["gpus"]:
        gpu["compute_capability"] = "8.6"
    assert verdicts(record) == "fail fail fail fail"

    record["verdict_presumes"] = "the card is judged as if it were a V100"

    assert verdicts(record) == "pass pass pass pass"


@pytest.mark.parametrize(
    ("key", "text", "wanted"),
    [
        ("power.draw", "ERR!", "warn warn warn warn"),
        ("volatile_dbe", "GPU is lost", "fail fail fail fail"),
        ("handle", "Unable to determine the device handle", "fail fail fail fail"),
    ],
)
def test_text_in_place_of_a_value_counts(record, verdicts, key, text, wanted):
    record["gpus"][0]["read_errors"] = {key: text}
    if key.startswith("power"):
        record["gpus"][0]["power_w"]["draw"] = None

    assert verdicts(record) == wanted


def test_lanes_of_a_board_on_a_pcie_carrier_are_not_dead(record, verdicts):
    for gpu in record["gpus"]:
        gpu["nvlink"] = [{"link": lane, "active": False} for lane in range(6)]
    assert verdicts(record) == "pass pass pass pass"

    record["gpus"][0]["nvlink"][0]["active"] = True

    assert verdicts(record) == "pass pass fail warn"


@pytest.mark.parametrize(
    "reason", ["HW Thermal Slowdown", "hw_thermal_slowdown", "HW Power Brake Slowdown"]
)
def test_hardware_slowdown_is_known_in_every_spelling(record, verdicts, reason):
    record["gpus"][0]["clock_reasons_active"] = [reason]

    assert verdicts(record) == "fail fail fail fail"


def test_software_slowdown_only_warns(record, verdicts):
    record["gpus"][0]["clock_reasons_active"] = ["sw_thermal_slowdown"]

    assert verdicts(record) == "warn warn warn warn"


def test_xid_without_a_gpu_counts_against_every_plan(record, verdicts):
    record["kernel"]["xids"] = [{"xid": 79, "gpu": None, "count": None, "note": None}]

    assert verdicts(record) == "fail fail fail fail"


@pytest.mark.parametrize(
    ("section", "changes", "strict"),
    [
        ("ecc", {"volatile_dbe": None}, "unknown unknown unknown unknown"),
        ("retired", {"pending": None}, "unknown unknown unknown unknown"),
        ("pcie", {"width_current": None}, "pass unknown unknown unknown"),
        ("temp_c", {"gpu": None}, "pass pass pass pass"),
    ],
)
def test_strict_evidence_asks_for_what_a_start_needs_and_no_more(
    record, verdicts, section, changes, strict
):
    record["gpus"][0][section].update(changes)

    assert verdicts(record) == "pass pass pass pass"
    assert verdicts(record, Evidence.STRICT) == strict


@pytest.mark.parametrize("part", ["host", "gpus", "plan_gpus"])
def test_record_that_lacks_a_part_is_refused(record, part):
    del record[part]

    with pytest.raises(SampleError, match="not a whole record"):
        facts_of_sample(record)


def test_record_of_another_schema_is_refused(record):
    record["schema"] = "v100-health-sample/2"

    with pytest.raises(SampleError, match="v100-health-sample/1 is needed"):
        facts_of_sample(record)


def test_recorded_state_reads_back_as_the_facts_it_was_made_of(machine, tmp_path):
    host = machine.host(environment={"NCCL_X": "1"})
    path = tmp_path / "state.json"
    path.write_text(record_text(host, machine.plan("tp2")))

    facts, uuids, sample = load_state(path)

    assert (uuids, sample) == (("GPU-0", "GPU-1"), False)
    assert facts.gpus[0].ecc == host.gpus[0].ecc
    assert facts.pairs == host.pairs
    assert (facts.environment, facts.boot_id) == ({}, None)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.pop("facts"),
        lambda r: r["facts"].update(gpus=[{"index": "0"}]),
        lambda r: r["facts"].update(nvml=7),
    ],
    ids=range(3),
)
def test_recorded_state_that_is_not_whole_is_refused(machine, tmp_path, change):
    record = json.loads(record_text(machine.host(), machine.plan("tp2")))
    change(record)
    path = tmp_path / "state.json"
    path.write_text(json.dumps(record))

    with pytest.raises(SampleError, match="not a whole record"):
        load_state(path)


def test_link_without_a_generation_counts_as_the_newest_a_volta_trains_to(record, verdicts):
    for gpu in record["gpus"]:
        gpu["pcie"].update(gen_current=None, gen_max=None, width_current=8, width_max=8)

    assert verdicts(record) == "pass pass warn warn"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("[" * 200_000, "nested too deeply"),
        ('{"x": 1e999}', "1e999 is no number"),
        ("[]", "a JSON object"),
    ],
)
def test_file_that_is_no_record_is_refused(tmp_path, text, words):
    file = tmp_path / "record.json"
    file.write_text(text)

    with pytest.raises(SampleError, match=words):
        load_state(file)


def test_device_without_an_end_is_refused():
    with pytest.raises(SampleError, match="larger than"):
        load_state(Path("/dev/zero"))


def test_record_hides_names_in_the_texts_of_errors_too(machine, tmp_path):
    uuid, other = (f"GPU-{n}c1fabcd-1111-2222-3333-444455556666" for n in (8, 9))
    gpu = machine.gpu(0, uuid=uuid, serial="0324917000123", bus_id="00000000:3B:00.0")
    host = machine.host(
        replace(gpu, alloc=f"error on {uuid}, serial 0324917000123"),
        machine.gpu(1),
        pairs=(machine.pair(functional_detail=f"{uuid} at 00000000:3B:00.0: pid 4242 died"),),
        nvml_detail=f"{other} at 0000:af:00.0 is lost",
    )
    file = tmp_path / "record.json"

    file.write_text(record_text(host, machine.plan("tp2", uuids=(uuid, "GPU-1"))))

    facts, gpus, _ = load_state(file)
    assert gpus == ("GPU-0", "GPU-1")
    assert facts.gpus[0].alloc == "error on GPU-0, serial hidden"
    assert facts.pairs[0].functional_detail == "GPU-0 at bus-0: pid hidden died"
    assert facts.nvml_detail == "GPU-hidden at bus-hidden is lost"
