"""What the engine says of itself while it loads, held against the plan; pure, line by line.

A flag that a wrapper lost, or a backend that the engine chose otherwise, starts without an error
and serves something else than was planned. An engine that tells nothing is taken at its word.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from appliance.serve.diagnose import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.plan.launch_plan import LaunchPlan

_CONFIG = re.compile(r"Initializing a V1 LLM engine .*? with config: (?P<fields>.*)")
_FIELD = re.compile(r"(?:^|, )(?P<name>[a-z_]+)=(?P<value>'[^']*'|[^,]*)")
_BACKEND = re.compile(
    r"Using (?:AttentionBackendEnum\.)?(?P<name>[A-Z][A-Z0-9_]+) "
    r"(?:backend\.$|attention backend out of )"
)


class Effective:
    """Collects the engine's own words."""

    def __init__(self) -> None:
        """Begin with none."""
        self._fields: dict[str, str] = {}
        self._backends: set[str] = set()

    def note(self, line: str) -> None:
        """Take one line of the engine's log."""
        config = _CONFIG.search(line)
        if config is not None:
            for match in _FIELD.finditer(config["fields"]):
                self._fields.setdefault(match["name"], match["value"].strip("'"))
        backend = _BACKEND.search(line.rstrip())
        if backend is not None:
            self._backends.add(backend["name"])

    def mismatch(self, plan: LaunchPlan) -> Diagnosis | None:
        """Return what differs from the plan, None if nothing that was told does."""
        wanted = plan.execution.attention_backend
        others = sorted(self._backends - {wanted})
        if wanted is not None and others:
            names = (f"want {wanted}", f"got {', '.join(others)}")
            what = "the engine took another attention backend than the plan names"
            return Diagnosis("BACKEND_MISMATCH", what, "report the engine's log", names)
        seen = tuple(
            f"{name}: want {value}, got {self._fields[name]}"
            for name, value in _planned(plan)
            if self._fields.get(name, value) != value
        )
        if not seen:
            return None
        what = "the engine runs with other settings than the plan's"
        return Diagnosis("EFFECTIVE_CONFIG", what, "report the engine's log", seen)


def _planned(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    """Yield the fields of the engine's configuration that the plan decides, as it prints them."""
    yield "model", plan.model.path
    yield "served_model_name", plan.model.served_name
    yield "max_seq_len", str(plan.model.max_model_len)
    yield "dtype", f"torch.{plan.execution.dtype}"
    yield "tensor_parallel_size", str(plan.parallel.tensor_parallel)
    yield "pipeline_parallel_size", str(plan.parallel.pipeline_parallel)
    yield "quantization", "nvfp4" if plan.model.quantization == "nvfp4" else "None"
    if not plan.execution.custom_all_reduce:
        yield "disable_custom_all_reduce", "True"
