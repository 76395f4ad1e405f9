"""The golden plans: public models, all header, on assumed V100s; the report and every share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from modules import module_at

from appliance.checkpoint.read import summarize
from appliance.config.load import LoadedConfig
from appliance.config.schema import Config
from appliance.plan.chart import report
from appliance.plan.launch_plan import LaunchPlan
from appliance.plan.planner import make_plan
from healthchecks.assumed import assumed_host

HOLLOW = module_at(Path(__file__).parents[2] / "machines" / "hollow.py")
WIDTH = 80
CASES = {
    "qwen2.5-7b": ("1x32GiB", "2x16GiB", "2x32GiB"),
    "qwen2.5-14b": ("1x32GiB", "2x16GiB", "2x16GiB-nvlink", "2x32GiB"),
    "qwen3-30b-a3b": ("1x32GiB", "2x16GiB-p2p", "2x32GiB"),
    "qwen3.5-35b-a3b": ("1x32GiB", "2x16GiB-nvlink", "2x32GiB"),
    "quasar-27b": ("1x32GiB", "2x16GiB", "2x16GiB-nvlink", "2x32GiB"),
}


def plans(model: str, hosts: tuple[str, ...]) -> Iterator[tuple[str, LaunchPlan]]:
    """Yield host and plan of one model with a configuration that leaves everything open."""
    config = Config.model_validate({"version": 1, "model": {"path": f"/models/{model}"}})
    loaded = LoadedConfig(config, Path("appliance.yaml"), "0" * 64)
    with tempfile.TemporaryDirectory() as place:
        checkpoint = summarize(HOLLOW.build(Path(place), model))
    for host in hosts:
        yield host, make_plan(loaded, checkpoint, assumed_host(host))


def text(plan: LaunchPlan) -> str:
    """Return the report for people and one line a share."""
    lines = [report(plan, width=WIDTH, unicode=False)]
    for budget in plan.memory.ranks:
        lines.append(f"rank {budget.rank}: {budget.used_bytes} of {budget.usable_bytes} usable")
        lines += [f"  {item.name:<22}{item.bytes:>14}  {item.formula}" for item in budget.items]
    return "\n".join(lines) + "\n"


def outputs(model: str) -> dict[str, str]:
    """Return file name to text of one model's golden files."""
    made = plans(model, CASES[model])
    return {f"{model}-{host}.txt": text(plan) for host, plan in made}
