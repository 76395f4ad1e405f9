"""Reads the plan out of what `appliance validate --json` printed."""

from __future__ import annotations

import json
from typing import Any

from appliance.plan.launch_plan import LaunchPlan
from appliance.render.argv import vllm_argv


def plan_of(ended: Any) -> LaunchPlan:
    """Return the plan of a run that ended in 0."""
    assert ended.code == 0, ended.err
    return LaunchPlan.from_json(json.dumps(json.loads(ended.out)["plan"]))


def words_of(plan: LaunchPlan) -> list[str]:
    """Return the flags that the plan renders to."""
    return [word for item in vllm_argv(plan) for word in item.words]
