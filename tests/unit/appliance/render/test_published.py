"""A container's published ports: listeners on every address inside, the plan keeps its own."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest

from appliance.plan.launch_plan import LaunchPlan
from appliance.render.argv import vllm_argv
from appliance.render.compose import published_ports


@pytest.fixture
def plan(cases: ModuleType) -> LaunchPlan:
    return cases.CASES["default_tensor"].plan


def published(plan: LaunchPlan) -> LaunchPlan:
    return replace(plan, server=replace(plan.server, published=True))


def hosts(plan: LaunchPlan) -> list[tuple[str, ...]]:
    words = (item.words for item in vllm_argv(plan))
    return [each for each in words if each[0].startswith("--host")]


def test_listeners_of_a_published_plan_take_every_address(plan: LaunchPlan) -> None:
    server = published(plan).server

    assert (server.listen_host, server.listen_admin_host) == ("0.0.0.0", "0.0.0.0")  # noqa: S104
    assert hosts(published(plan)) == [("--host=0.0.0.0",)]


def test_listeners_of_any_other_plan_take_the_configured_address(plan: LaunchPlan) -> None:
    moved = replace(plan, server=replace(plan.server, host="10.0.0.5", admin_host="10.0.0.6"))

    assert (moved.server.listen_host, moved.server.listen_admin_host) == ("10.0.0.5", "10.0.0.6")
    assert hosts(moved) == [("--host=10.0.0.5",)]


def test_published_plan_keeps_the_address_that_compose_publishes(plan: LaunchPlan) -> None:
    assert published(plan).server.host == "127.0.0.1"
    assert published_ports(published(plan)) == published_ports(plan)


def test_published_survives_the_plan_file_and_may_be_absent_from_it(plan: LaunchPlan) -> None:
    assert LaunchPlan.from_json(published(plan).to_json()) == published(plan)
    older = plan.to_json().replace(',\n    "published": false', "")
    assert "published" not in older
    assert LaunchPlan.from_json(older) == plan
