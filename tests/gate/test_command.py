"""`appliance gate` and `python -m healthchecks`: codes, forms, records, acknowledgements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from appliance.cli import main
from appliance.config.gate import GateSection
from appliance.errors import ApplianceError, ExitCode
from appliance.gate.gate import gate_plan_of, gate_without_plan, run_gate
from appliance.gate.styles import NPD_WIDTH
from healthchecks.__main__ import main as single
from healthchecks.collect import Depth, collect
from healthchecks.nvml import NvmlUnavailable
from healthchecks.runner import Options, run
from healthchecks.simulate import record_text

JSON_SCHEMA = "report.schema.json"


def sample(sample_folder, name: str) -> str:
    return str(next(sample_folder.glob(f"{name}-*.json")))


@pytest.fixture
def samples(sample_folder):
    """Return a function from a record's number to its path."""
    return lambda name: sample(sample_folder, name)


@pytest.mark.parametrize(
    ("style", "record", "code"),
    [
        ("native", "d01", 0),
        ("native", "d02", 0),
        ("native", "d03", 20),
        ("docker", "d01", 0),
        ("docker", "d02", 0),
        ("docker", "d03", 1),
        ("nagios", "d01", 0),
        ("nagios", "d02", 1),
        ("nagios", "d03", 2),
        ("npd", "d01", 0),
        ("npd", "d02", 0),
        ("npd", "d03", 1),
    ],
)
def test_exit_style_of_pass_warn_and_fail(samples, capsys, style, record, code):
    words = ["gate", "--simulate", samples(record), "--as", "tp2", "--exit-style", style]

    assert main(words) == code

    out = capsys.readouterr().out
    if style != "native":
        assert out.count("\n") == 1
    if style == "npd":
        assert len(out.rstrip("\n")) <= NPD_WIDTH


@pytest.mark.parametrize(
    ("style", "code"), [("native", 21), ("docker", 1), ("nagios", 3), ("npd", 2)]
)
def test_exit_style_of_unknown(samples, style, code):
    words = ["gate", "--simulate", samples("h24"), "--as", "tp2", "--p2p", "require"]

    assert main([*words, "--exit-style", style]) == code


def test_table_names_fault_remedy_and_another_plan(samples, capsys):
    main(["gate", "--simulate", samples("h23"), "--as", "tp2"])

    out = capsys.readouterr().out
    assert out.startswith("gate FAIL for tp2: pcie.rate")
    assert "-> reseat the card" in out
    assert "suggest   plan pp2" in out


def test_json_report_of_every_style_of_record_fits_the_schema(sample_path, sample_folder, capsys):
    schema = json.loads((sample_folder / "schema" / JSON_SCHEMA).read_text())

    main(["gate", "--simulate", str(sample_path), "--as", "tp2", "--json"])

    jsonschema.validate(json.loads(capsys.readouterr().out), schema)


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (None, "no such file or directory"),
        ("", "no JSON: Expecting value"),
        ("{", "no JSON: "),
        ("[]", "JSON that is no object"),
        ('{"schema": "other/1"}', 'schema "other/1"; '),
        ('{"schema": "v100-health-sample/1"}', "not a whole record: host is missing"),
        ('{"schema": "appliance-machine-state/1"}', "not a whole record: facts is missing"),
    ],
)
def test_record_that_cannot_be_read_is_a_usage_error(tmp_path, capsys, content, value):
    path = tmp_path / "record.json"
    if content is not None:
        path.write_text(content)

    assert main(["gate", "--simulate", str(path), "--as", "single"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert said.startswith(f"error[GATE_RECORD] {path}: a recorded machine state, got {value}")


def test_as_without_simulate_is_a_usage_error(capsys):
    assert main(["gate", "--as", "single"]) == ExitCode.USAGE
    assert "error[GATE_USAGE]" in capsys.readouterr().err


def test_recorded_machine_replays_with_the_same_verdict_and_without_serials(lab, capsys):
    scenario = lab.healthy()
    scenario["gpus"][1]["ecc"].update(volatile_dbe=1, aggregate_dbe=1)
    scenario["gpus"][0]["links"] = [{"active": 1, "remote": scenario["gpus"][1]["bus_id"]}]
    lab.machine(scenario)
    plan = lab.plan("tp2")
    facts = collect(plan, Depth(cuda=False))
    facts = replace(
        facts,
        gpus=tuple(replace(gpu, alloc="ok") for gpu in facts.gpus),
        pairs=tuple(replace(pair, functional="ok") for pair in facts.pairs),
    )
    path = lab.tmp / "record.json"
    path.write_text(record_text(facts, plan))
    live = run(plan, Options(read=lambda _plan, _depth: facts))

    code = main(["gate", "--simulate", str(path), "--as", "tp2", "--json"])

    replayed = json.loads(capsys.readouterr().out)
    text = path.read_text()
    assert (code, replayed["verdict"]) == (20, "fail")
    assert [c["id"] for c in replayed["checks"] if c["status"] == "fail"] == [
        result.id for result in live.checks if result.status == "fail"
    ]
    for secret in ("0320", "0321", "00000000:10", "00000000:11"):
        assert secret not in text


def test_gate_of_a_launch_plan_on_the_cpu_skips_every_gpu_check(launch_plan):
    report = run_gate(launch_plan("cpu"))

    assert (report.verdict, report.exit_code) == ("pass", ExitCode.OK)
    assert {check.message for check in report.checks} == {"skipped: the plan uses no GPU"}
    assert dict(report.adjustments.env) == {}


def test_gate_of_a_launch_plan_replays_a_record(launch_plan, samples):
    report = run_gate(launch_plan("cuda"), simulate=Path(samples("h08")))

    assert report.verdict == "warn"
    assert report.adjustments.args == ("--disable-custom-all-reduce",)


def test_launch_plan_without_its_gate_section_is_a_configuration_error(launch_plan):
    with pytest.raises(ApplianceError) as caught:
        gate_plan_of(replace(launch_plan("cuda"), gate={}))
    assert caught.value.exit_code is ExitCode.CONFIG


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("driver_not_loaded", 11),
        ("library_not_found", 11),
        ("timeout", 21),
        ("version_mismatch", 20),
    ],
)
def test_machine_that_cannot_be_planned_for_still_has_a_report(kind, code):
    report = gate_without_plan(GateSection(), NvmlUnavailable(kind, "words"))

    assert report.exit_code == code


def test_hanging_nvml_ends_the_command_in_its_deadline_with_the_contracts_code(lab, config_file):
    lab.machine(lab.healthy() | {"faults": [{"call": "nvmlInitWithFlags", "hang_ms": -1}]})
    started = time.monotonic()

    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "appliance",
            "gate",
            "--config",
            config_file("timeout: 2s"),
            "--json",
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == ExitCode.GATE_UNKNOWN, done.stderr
    assert json.loads(done.stdout)["verdict"] == "unknown"
    assert time.monotonic() - started < 2.0 + 6.0


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"call": "*", "gpu": 0, "hang_ms": -1}, 21),
        ({"call": "*", "gpu": 0, "after": 5, "return": 15}, 20),
    ],
    ids=["hangs", "lost"],
)
def test_gpu_that_cannot_be_planned_with_is_still_named(lab, config_file, capsys, fault, code):
    lab.machine(lab.healthy() | {"faults": [fault]})

    assert main(["gate", "--config", config_file(), "--json"]) == code

    report = json.loads(capsys.readouterr().out)
    refusing = [item for item in report["checks"] if item["status"] in ("fail", "unknown")]
    assert "gpu.present" in [item["id"] for item in refusing]


def test_driver_that_is_not_loaded_is_exit_11_with_a_report(lab, config_file, capsys):
    lab.machine({"init": {"error": 9}, "gpus": []})

    assert main(["gate", "--config", config_file(), "--json"]) == ExitCode.NO_GPU
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == 11
    assert report["plan"]["gpu_uuids"] == ["none"]


def test_ack_from_the_command_line_clears_and_says_so(lab, config_file, capsys):
    scenario = lab.healthy()
    plan = lab.plan("single")
    run(plan, Options(Depth(cuda=False)))
    scenario["gpus"][0]["ecc"]["aggregate_dbe"] = 1
    lab.machine(scenario)
    run(plan, Options(Depth(cuda=False)))
    words = [
        "gate",
        "--config",
        config_file(),
        "ack",
        "ecc.dbe.growth",
        "--gpu",
        "GPU-0",
        "--by",
        "ops",
    ]

    short = main([*words, "--reason", "because"])
    good = main([*words, "--reason", "page retired, rebooted"])
    again = main([*words, "--reason", "page retired, rebooted"])

    captured = capsys.readouterr()
    assert (short, good, again) == (ExitCode.USAGE, ExitCode.OK, ExitCode.USAGE)
    assert json.loads(captured.out) == {"acknowledged": "ecc.dbe.growth", "gpu": "GPU-0"}
    assert "error[GATE_ACK]" in captured.err


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, 0),
        ({"volatile_dbe": 1}, 1),
        ({"volatile_dbe": {"error": 999}}, 2),
        ({"aggregate_dbe": 1}, 0),
    ],
    ids=["pass", "fail", "unknown", "warn"],
)
def test_single_check_has_its_codes(lab, launch_plan, capsys, change, code):
    scenario = lab.healthy()
    scenario["gpus"][0]["ecc"].update(change)
    lab.machine(scenario)
    path = lab.tmp / "plan.json"
    path.write_text(launch_plan("cuda").to_json())

    assert single(["ecc", "--plan", str(path), "--json"]) == code

    report = json.loads(capsys.readouterr().out)
    assert {check["id"].split(".")[0] for check in report["checks"]} == {"nvml", "ecc"}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"parallel": {}}'])
def test_single_check_without_a_plan_cannot_tell(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_text(content)

    assert single(["ecc", "--plan", str(path)]) == 2
    assert single(["ecc", "--plan", str(tmp_path / "absent.json")]) == 2


def test_single_check_prints_one_line_a_judgement(lab, launch_plan, capsys):
    path = lab.tmp / "plan.json"
    path.write_text(launch_plan("cuda").to_json())

    assert single(["persistence", "--plan", str(path)]) == 0
    assert "PASS host.persistence gpu:GPU-0" in capsys.readouterr().out


def test_gate_that_ends_leaves_no_child(lab):
    run(lab.plan("single"), Options(Depth(cuda=False)))

    assert [pid for pid, parent in processes() if parent == os.getpid()] == []


def processes() -> list[tuple[int, int]]:
    """Return every process with its parent that runs this package, ended ones included."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if not command or b"healthchecks." in command:
            found.append((int(entry.name), parent))
    return found


def test_record_of_a_replayed_machine_replays_again(samples, tmp_path, capsys):
    path = tmp_path / "machine.json"
    words = ["gate", "--simulate", samples("d05"), "--as", "tp2"]

    first = main([*words, "--record", str(path), "--json"])
    verdict = json.loads(capsys.readouterr().out)["verdict"]

    assert (first, verdict) == (0, "warn")
    assert json.loads(path.read_text())["plan_gpus"] == ["GPU-0", "GPU-1"]


def test_record_into_a_folder_that_is_not_there_is_a_usage_error(samples, tmp_path, capsys):
    path = tmp_path / "absent" / "machine.json"

    code = main(["gate", "--simulate", samples("d05"), "--as", "tp2", "--record", str(path)])

    assert code == ExitCode.USAGE
    assert "error[GATE_USAGE]" in capsys.readouterr().err
