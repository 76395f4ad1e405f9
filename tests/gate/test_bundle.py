"""What a support bundle says of a machine with GPUs, over the fake libraries."""

from __future__ import annotations

import json
import tarfile

import pytest

from appliance.cli import main
from appliance.commands._bundle_machine import look, verdict, versions
from healthchecks.state_file import StateFile

SERIAL = "0321918273645"


def with_serial(lab) -> None:
    machine = lab.healthy()
    machine["gpus"][0]["serial"] = SERIAL
    lab.machine(machine)


def made(config, folder) -> dict[str, bytes]:
    """Make a bundle and return what is in it."""
    target = folder / "bundle.tar.gz"
    assert main(["bundle", "--config", config, "-o", str(target), "--json"]) == 0
    with tarfile.open(target) as archive:
        return {
            name.removeprefix("appliance-bundle/"): archive.extractfile(name).read()
            for name in archive.getnames()
        }


def test_bundle_holds_the_machine_without_its_serials(lab, config_file, tmp_path):
    with_serial(lab)

    found = made(config_file(), tmp_path)

    assert SERIAL.encode() not in b"".join(found.values())
    assert json.loads(found["versions.json"])["driver"] == "580.95.05"
    gpus = json.loads(found["machine.json"])["facts"]["gpus"]
    assert [gpu["name"] for gpu in gpus] == ["Tesla V100-PCIE-32GB"] * 2
    missing = {part["path"] for part in json.loads(found["MANIFEST.json"])["missing"]}
    assert {"plan.json", "gate.json"} <= missing
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("fault", "expected"), [({"hang_ms": -1}, "unknown"), ({"after": 5, "return": 15}, "fail")]
)
def test_gpu_that_hangs_or_is_lost_is_judged_without_a_plan(
    lab, config_file, tmp_path, fault, expected
):
    machine = lab.healthy()
    machine["faults"] = [{"call": "*", "gpu": 0, **fault}]
    lab.machine(machine)

    found = made(config_file(), tmp_path)

    report = json.loads(found["gate.json"])
    assert report["verdict"] == expected
    assert json.loads(found["versions.json"])["driver"] == "580.95.05"


@pytest.mark.usefixtures("lab")
def test_verdict_is_the_gates_own_and_nothing_is_touched_by_cuda(launch_plan, tmp_path):
    plan, state = launch_plan("cuda"), tmp_path / "state"

    seen = look(plan, None, state)
    report = verdict(seen, None, state)

    checks = {check.id: check.status.value for check in report.checks}
    assert checks["ecc.mode"] == checks["driver.min"] == "pass", checks
    assert report.report.plan.kind == "tp2"
    assert all(gpu.alloc is None and gpu.selftest is None for gpu in seen.facts.gpus)
    assert versions(seen)["driver"] == "580.95.05"
    assert not state.exists()


@pytest.mark.usefixtures("lab")
def test_broken_state_is_left_alone_and_a_host_that_needs_help_unread(launch_plan, tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    (state / "state.json").write_text("{")

    report = verdict(look(launch_plan("cuda"), None, state), None, state)

    assert (state / "state.json").read_text() == "{"
    assert [path.name for path in state.iterdir()] == ["state.json"]
    assert report.exit_code != 0
    StateFile(state).require_action("process 7 hangs", None)
    held = look(launch_plan("cuda"), None, state)
    assert held.facts.gpus == ()
    assert verdict(held, None, state).verdict == "fail"
