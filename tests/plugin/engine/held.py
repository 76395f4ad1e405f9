"""Worker extension for the tests: reports what each rank's model holds."""

from __future__ import annotations

import importlib
import os
from typing import Any

CHOICE = "TESTS_PLUGIN_CHOICE"
"""Names a module of this folder whose `choose` is called in every rank."""

if CHOICE in os.environ:
    importlib.import_module(os.environ[CHOICE]).choose()


class HeldBytes:
    """Mixed into the engine's worker by `worker_extension_cls`."""

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of every parameter of this rank's model, by name."""
        model: Any = self.model_runner.model
        return {name: p.nbytes for name, p in model.named_parameters(remove_duplicate=True)}
