"""The hand-built plans of the golden files, and the module that makes them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from modules import module_at

from appliance.plan.launch_plan import LaunchPlan


@pytest.fixture(scope="session")
def golden(repository: Path) -> ModuleType:
    """tests/golden/update.py."""
    return module_at(repository / "tests/golden/update.py")


@pytest.fixture(scope="session")
def cases(repository: Path) -> ModuleType:
    """tests/golden/render/cases.py."""
    return module_at(repository / "tests/golden/render/cases.py")


@pytest.fixture
def plan(cases: ModuleType) -> LaunchPlan:
    return cases.CASES["default_tensor"].plan


@pytest.fixture
def cpu_plan(cases: ModuleType) -> LaunchPlan:
    return cases.CASES["cpu_two_ranks"].plan
