"""A head that is packed though the exclude list names it: refused, or served as what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoint.read import summarize
from appliance.checkpoint.rules import Lenient
from appliance.config.load import load_config
from appliance.plan.host import cpu_host
from appliance.plan.launch_plan import LaunchPlan
from appliance.plan.planner import make_plan
from appliance.plan.split import Split
from appliance.plan.weights import WeightForm, weight_items
from appliance.render.argv import vllm_argv

pytestmark = pytest.mark.engine

PROMPTS = [[1, 5, 9, 100, 33, 7], [4, 4, 8, 250, 499], [3]]
FLAG = "--additional-config="
FP32 = WeightForm(element_bytes=4, packed=False)

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def root(models: Path) -> Path:
    for name in ("tokenizer.json", "chat_template.jinja"):  # a plan asks that they are there
        (models / "head-excluded" / "model" / name).touch()
    return models / "head-excluded"


def planned(model: Path, directory: Path) -> LaunchPlan:
    """Return the plan of a configuration that lets tensors win."""
    path = directory / "appliance.yaml"
    section = f"{{path: {model}, max_model_len: 256, lenient: tensors-win}}"
    execution = "{device: cpu, weights: dequantized}"
    path.write_text(f"version: 1\nmodel: {section}\nexecution: {execution}\n")
    loaded = load_config(path)
    return make_plan(loaded, summarize(model, Lenient(loaded.config.model.lenient)), cpu_host())


@pytest.fixture(scope="module")
def plan(root: Path, tmp_path_factory: pytest.TempPathFactory) -> LaunchPlan:
    return planned(root / "model", tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def results(root: Path, plan: LaunchPlan, checkpoints: Any) -> Results:
    """Results of one engine as it is without the key, and one with the plan's own flag."""
    words = [word for item in vllm_argv(plan) for word in item.words]
    [given] = [word.removeprefix(FLAG) for word in words if word.startswith(FLAG)]
    job = {"model": str(root / "model"), "tp": 1, "prompts": PROMPTS, "tokens": 16}
    lenient = {"additional_config": json.loads(given), "twin": str(root / "twin")}
    jobs = [job | {"name": "strict"}, job | {"name": "lenient"} | lenient]
    return checkpoints.run("lenient", jobs, timeout_s=600)


def test_engine_refuses_a_packed_head_that_is_excluded(results: Results) -> None:
    message = results["strict"]["error"]

    assert message.startswith("ApplianceError: error[E_EXCLUDED_BUT_QUANTIZED] lm_head: ")
    assert "model.lenient: tensors-win" in message


def test_engine_serves_it_as_its_twin_where_tensors_win(results: Results) -> None:
    result = results["lenient"]

    assert result.get("error") is None
    assert result["tokens"] == result["twin"]


def test_engine_warns_of_it_once(results: Results) -> None:
    warning = "nvfp4.tensors_win code=W_EXCLUDED_BUT_QUANTIZED name=lm_head count=1"

    assert results["lenient"]["log"].count(warning) == 1


def test_plan_warns_of_it_and_counts_what_the_engine_holds(
    results: Results, root: Path, plan: LaunchPlan
) -> None:
    summary = summarize(root / "model", Lenient.TENSORS_WIN)
    items = weight_items(summary, Split(1, 1), 0, FP32)

    assert any(warning.startswith("W_EXCLUDED_BUT_QUANTIZED") for warning in plan.warnings)
    assert any("model.lenient: packed tensors win" in warning for warning in plan.warnings)
    assert sum(results["lenient"]["ranks"][0].values()) == sum(item.bytes for item in items)
