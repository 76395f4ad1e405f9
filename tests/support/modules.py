"""Loads a file of the tests as a module: their folders are no packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).parents[2]


def module_at(path: Path) -> ModuleType:
    """Return the module of a file below the repository; each is run once in a process."""
    name = "_".join(path.resolve().relative_to(REPOSITORY).with_suffix("").parts)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]  # half a module is none
            raise
    return sys.modules[name]
