"""Faults that outlive the run that saw them."""

from __future__ import annotations

import json

from healthchecks.facts import KernelFacts, XidFacts
from healthchecks.runner import ack

MIB, GIB = 1024**2, 1024**3
NVLINK = {"nvlink_lanes": 2}


def ids(report) -> list[str]:
    return [result.id for result in report.worst()]


def changed(lab, section: str, gpu: int = 0, **values):
    scenario = lab.healthy()
    scenario["gpus"][gpu][section].update(values)
    lab.machine(scenario)


def test_double_bit_errors_that_grow_while_no_container_ran_are_caught_until_acknowledged(
    gate, lab
):
    changed(lab, "ecc", aggregate_dbe=1)
    gate("single")
    changed(lab, "ecc", aggregate_dbe=2)

    report = gate("single")

    assert (report.exit_code, ids(report)) == (20, ["ecc.dbe.growth"])
    ack(lab.tmp / "state", "ecc.dbe.growth", "GPU-0", by="ops", reason="page retired and rebooted")
    assert gate("single").exit_code == 0


def test_bus_loss_of_this_boot_is_refused_and_recorded(gate, lab):
    report = gate("single", kernel=KernelFacts("read", (XidFacts(79, 0),)))

    state = json.loads((lab.tmp / "state" / "state.json").read_text())
    assert (report.exit_code, ids(report)) == (20, ["xid.79"])
    assert state["gpus"]["GPU-0"]["latched"][0]["check"] == "xid.79"
