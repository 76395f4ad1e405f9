"""A plan that is read back is exactly a plan, or refused with its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from appliance.checkpoint.summary import CheckpointSummary
from appliance.config.load import LoadedConfig
from appliance.errors import ApplianceError, ExitCode
from appliance.plan.launch_plan import LaunchPlan
from appliance.plan.planner import make_plan
from healthchecks.assumed import assumed_host


@pytest.fixture
def document(
    configure: Callable[..., LoadedConfig], tiny: Callable[..., CheckpointSummary]
) -> dict[str, Any]:
    plan = make_plan(configure(), tiny(), assumed_host("1x16GiB"))
    return json.loads(plan.to_json())


def where_refused(text: str) -> str:
    with pytest.raises(ApplianceError) as caught:
        LaunchPlan.from_json(text)
    assert caught.value.exit_code == ExitCode.CONFIG
    (fault,) = caught.value.faults
    assert fault.code == "PLAN_INVALID"
    return fault.where


CHANGES: dict[str, tuple[tuple[str | int, ...], object]] = {
    "plan plan_version": (("plan_version",), 2),
    "plan surplus": (("surplus",), 1),
    "plan server.port": (("server", "port"), "8000"),
    "plan server.drain_timeout_s": (("server", "drain_timeout_s"), True),
    "plan execution.dtype": (("execution", "dtype"), "bfloat16"),
    "plan execution.enforce_eager": (("execution", "enforce_eager"), 1),
    "plan memory.ranks[0].layers": (("memory", "ranks", 0, "layers"), [0]),
    "plan memory.ranks[0].items[0].bytes": (("memory", "ranks", 0, "items", 0, "bytes"), 1.5),
    "plan model.chat_template": (("model", "chat_template"), 5),
    "plan parallel.gpus": (("parallel", "gpus"), "GPU-0"),
    "plan gate": (("gate",), []),
    "plan execution.extra_args.x": (("execution", "extra_args"), {"x": None}),
}


@pytest.mark.parametrize("where", CHANGES)
def test_changed_plan_is_refused_at_its_place(document: dict[str, Any], where: str) -> None:
    path, value = CHANGES[where]
    inner: Any = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value

    assert where_refused(json.dumps(document)) == where


def test_missing_key_is_refused(document: dict[str, Any]) -> None:
    del document["server"]["port"]

    assert where_refused(json.dumps(document)) == "plan server.port"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7", "[" * 100_000], ids=lambda t: t[:3])
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    assert where_refused(text).startswith("plan")


def test_whole_number_may_stand_for_seconds(document: dict[str, Any]) -> None:
    document["server"]["drain_timeout_s"] = 60

    assert LaunchPlan.from_json(json.dumps(document)).server.drain_timeout_s == 60.0
