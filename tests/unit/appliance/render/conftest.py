"""The hand-built plans of the golden files, and the module that makes them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from modules import module_at


@pytest.fixture(scope="session")
def golden(repository: Path) -> ModuleType:
    """tests/golden/update.py."""
    return module_at(repository / "tests/golden/update.py")


@pytest.fixture(scope="session")
def cases(repository: Path) -> ModuleType:
    """tests/golden/render/cases.py."""
    return module_at(repository / "tests/golden/render/cases.py")
