"""The hand-built plans of the golden files, and the module that makes them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str, path: Path) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def golden(repository: Path) -> ModuleType:
    """tests/golden/update.py."""
    return _load("golden_update", repository / "tests/golden/update.py")


@pytest.fixture(scope="session")
def cases(repository: Path) -> ModuleType:
    """tests/golden/render/cases.py."""
    return _load("render_cases", repository / "tests/golden/render/cases.py")
