"""The plan for people: bars of the right length, and the golden reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from appliance.checkpoint.summary import CheckpointSummary
from appliance.config.load import LoadedConfig
from appliance.plan.chart import NARROWEST, WIDEST, chart, report
from appliance.plan.launch_plan import LaunchPlan
from appliance.plan.planner import make_plan
from appliance.units import GIB
from healthchecks.assumed import assumed_host
from healthchecks.facts import HostFacts


@pytest.fixture
def plan(
    configure: Callable[..., LoadedConfig], public: Callable[[str], CheckpointSummary]
) -> LaunchPlan:
    return make_plan(configure(), public("quasar-27b"), assumed_host("2x16GiB"))


def bars(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("[")]


@pytest.mark.parametrize(
    ("columns", "expected"), [(80, 80), (100, 100), (10, NARROWEST), (400, WIDEST)]
)
def test_bar_is_as_wide_as_the_terminal_within_bounds(
    plan: LaunchPlan, columns: int, expected: int
) -> None:
    found = bars(chart(plan, width=columns, unicode=True))

    assert [len(bar) for bar in found] == [expected, expected]


def test_bar_is_divided_as_the_memory_is(plan: LaunchPlan) -> None:
    bar = bars(chart(plan, width=102, unicode=False))[0][1:-1]

    budget = plan.memory.ranks[0]
    assert bar.count("#") == round(100 * budget.weight_bytes / budget.total_bytes)
    assert bar.count(".") == round(100 * (1 - budget.used_bytes / budget.total_bytes))


def test_ascii_chart_has_ascii_only(plan: LaunchPlan) -> None:
    assert chart(plan, width=80, unicode=False).isascii()


def test_lines_of_the_chart_fit_the_terminal(plan: LaunchPlan) -> None:
    text = chart(plan, width=60, unicode=True)

    assert max(map(len, text.splitlines())) <= 60


def test_stages_name_their_layers(plan: LaunchPlan) -> None:
    text = chart(plan, width=80, unicode=False)

    assert "GPU 0, layers 0-31:" in text
    assert "GPU 1, layers 32-63:" in text


def test_cpu_ranks_are_named(
    on_cpu: Callable[..., LoadedConfig], tiny: Callable[..., CheckpointSummary]
) -> None:
    made = make_plan(on_cpu(), tiny(), HostFacts(memory_total_bytes=24 * GIB))

    assert "CPU rank 0:" in report(made, width=80, unicode=False)


@pytest.mark.parametrize(
    "model", ["qwen2.5-7b", "qwen2.5-14b", "qwen3-30b-a3b", "qwen3.5-35b-a3b", "quasar-27b"]
)
def test_report_equals_its_golden_file(
    golden_plans: ModuleType, repository: Path, model: str
) -> None:
    outputs = golden_plans.outputs(model)

    folder = repository / "tests" / "golden" / "plan"
    assert {name: (folder / name).read_text() for name in outputs} == outputs


def test_every_golden_file_has_a_case(golden_plans: ModuleType, repository: Path) -> None:
    named = {f"{model}-{host}.txt" for model, hosts in golden_plans.CASES.items() for host in hosts}

    assert {path.name for path in (repository / "tests/golden/plan").glob("*.txt")} == named
