"""From the gate's report to a start or a refusal; and what is read of the machine meanwhile."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from appliance.errors import ExitCode
from appliance.gate.defaults import plain_section
from appliance.serve.events import EventLog
from appliance.serve.judge import judge_machine, refusal_fault
from appliance.serve.observe import oom_kills, rank_reading
from healthchecks.facts import GpuFacts, PowerFacts
from healthchecks.result import CheckResult, Status

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.plan.launch_plan import LaunchPlan


def result(status: Status, check: str, remedy: str = "Reset the GPU.") -> CheckResult:
    return CheckResult(check, "gpu:GPU-aaaa", status, "3 errors", "0 errors", "It is bad.", remedy)


def test_refusal_names_the_first_refusing_check_and_counts_the_others() -> None:
    worst = (
        result(Status.FAIL, "ecc.dbe.volatile"),
        result(Status.UNKNOWN, "pcie.rate"),
        result(Status.WARN, "thermal.gpu"),
    )

    fault = refusal_fault(ExitCode.GATE_FAILED, worst)

    assert str(fault) == (
        "error[GATE_FAILED] gpu:GPU-aaaa ecc.dbe.volatile: must be 0 errors, got 3 errors, "
        "and 1 more (`appliance gate`); Reset the GPU."
    )


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (ExitCode.NO_GPU, "GATE_NO_GPU"),
        (ExitCode.CONTAINER, "GATE_CONTAINER"),
        (ExitCode.GATE_UNKNOWN, "GATE_UNKNOWN"),
    ],
)
def test_refusal_carries_the_name_of_its_exit_code(code: ExitCode, name: str) -> None:
    assert refusal_fault(code, (result(Status.UNKNOWN, "x"),)).code == name
    assert refusal_fault(code, ()).code == name


def test_cpu_engine_passes_the_gate_without_a_measurement(
    plan: Callable[..., LaunchPlan],
) -> None:
    stream = io.StringIO()
    single = {"kind": "single", "tensor_parallel": 1, "gpus": ()}
    made = replace(plan(execution={"device": "cpu"}, parallel=single), gate=plain_section())

    outcome = judge_machine(made, EventLog("text", "info", stream=stream))

    assert (outcome.exit_code, outcome.fault) == (ExitCode.OK, None)
    assert "gate.verdict verdict=pass exit_code=0" in stream.getvalue()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n", 2),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n", 4),
        ("low 0\n", 0),
    ],
)
def test_memory_kills_are_read_from_either_cgroup_version(
    tmp_path: Path, text: str, count: int
) -> None:
    path = tmp_path / "events"
    path.write_text(text)

    assert oom_kills((tmp_path / "absent", path)) == count


def test_gpu_reading_is_a_share_of_its_power_limit() -> None:
    gpu = GpuFacts(0, utilization_percent=100, power=PowerFacts(draw_w=47.0, limit_w=250.0))

    reading = rank_reading(1, gpu)

    assert (reading.rank, reading.utilization_percent) == (1, 100)
    assert reading.power_share == pytest.approx(0.188)
    assert rank_reading(0, None).utilization_percent is None
