"""Which ways of computing were run, and on what; every other way is refused unless asked for.

A kernel that nobody ran on a kind of GPU may start without an error and be simply wrong. So the
table says what was run, and how: an entry is no promise of speed, and none was run on a V100.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.plan.attention import OURS, UPSTREAM

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from appliance.config.load import LoadedConfig
    from appliance.plan.launch_plan import ExecutionPlan
    from healthchecks.facts import HostFacts

KEY = "execution.allow_unvalidated"
ENGINE = "0.27.1"
"""The vLLM that the table is about; another one is another table."""

Capability = tuple[int, int]
_FORMATS = frozenset({"nvfp4", "mixed", "dense", "fp8"})
"""Of checkpoints as the plan calls them; `fp8` and `mixed` hold FP8 by tensor, channel or block."""

_WEIGHTS = frozenset({"fused", "dequantized"})
RECURRENT = "recurrent"
"""Layers with a state, of hybrid models."""
_FEATURES = frozenset({"chunked_prefill", "prefix_caching", RECURRENT})


@dataclass(frozen=True)
class Row:
    """What was run.

    Attributes:
        capability: Compute capability of the GPU.
        attention: vLLM's name of the attention backend.
        evidence: How it was run.
        formats: Formats of checkpoints.
        weights: Values of `execution.weights`.
        features: Switches of `execution` that were on, and `recurrent` where hybrid models were.
    """

    capability: Capability
    attention: str
    evidence: str
    formats: frozenset[str] = _FORMATS
    weights: frozenset[str] = _WEIGHTS
    features: frozenset[str] = _FEATURES

    def __str__(self) -> str:
        """Return the row as one would read it in the table."""
        sets = (self.formats, self.weights, self.features)
        words = ", ".join("/".join(sorted(each)) or "none" for each in sets)
        return f"{_name(self.capability)} {self.attention}: {words}"


ROWS = (
    Row(
        (7, 0),
        OURS,
        "the library's sm_70 code on a modelled V100, kernel by kernel; dense products are torch's",
    ),
    Row(
        (9, 0),
        OURS,
        "the whole engine on H200, the library through its compute_70 PTX",
        formats=frozenset({"nvfp4", "dense", "fp8"}),
    ),
    Row(
        (9, 0),
        UPSTREAM,
        "the whole engine on H200, the library through its compute_70 PTX",
        formats=frozenset({"nvfp4", "mixed", "fp8"}),
    ),
)


@dataclass(frozen=True)
class Way:
    """What a plan would run."""

    capability: Capability
    attention: str
    format: str
    weights: str
    features: frozenset[str]

    def __str__(self) -> str:
        """Return its parts, as the message names them."""
        features = "/".join(sorted(self.features)) or "none"
        parts = (self.format, self.weights, features)
        return f"{_name(self.capability)} {self.attention}: {', '.join(parts)}"


def is_validated(way: Way, rows: Iterable[Row] = ROWS) -> bool:
    """Tell whether a row of the table covers it."""
    return any(
        (row.capability, row.attention) == (way.capability, way.attention)
        and way.format in row.formats
        and way.weights in row.weights
        and way.features <= row.features
        for row in rows
    )


def unvalidated(
    loaded: LoadedConfig,
    checkpoint_format: str,
    execution: ExecutionPlan,
    capabilities: Iterable[Capability],
    *,
    recurrent: bool = False,
    rows: Iterable[Row] = ROWS,
) -> str | None:
    """Return the warning of a plan that runs what was never run, None for all others.

    Args:
        loaded: The configuration.
        checkpoint_format: `nvfp4`, `mixed`, `fp8` or `dense`.
        execution: How the engine would compute.
        capabilities: What `capabilities_of` told of the GPUs that are used.
        recurrent: The model keeps a recurrent state.
        rows: The table.

    Raises:
        ApplianceError: NOT_VALIDATED (exit 30) unless the configuration allows it.
    """
    table = tuple(rows)
    for capability in capabilities:
        way = _way(capability, checkpoint_format, execution, recurrent=recurrent)
        if is_validated(way, table):
            continue
        if loaded.config.execution.allow_unvalidated:
            return f"{loaded.where(KEY)}: nobody ran {way}; the canary is all that judges it"
        near = [row for row in table if row.capability == capability] or table
        what = "must be true for what was never run; run was " + " | ".join(map(str, near))
        fix = "change what differs, or set it to true, which forces the canary"
        fault = Fault("NOT_VALIDATED", loaded.where(KEY), what, str(way), fix)
        raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)
    return None


def capabilities_of(host: HostFacts, indexes: Sequence[int]) -> list[Capability]:
    """Return the compute capabilities of these GPUs; one that could not be read is the gate's."""
    found = {gpu.compute_capability for gpu in host.gpus if gpu.index in indexes}
    return sorted(each for each in found if each is not None)


def _way(
    capability: Capability, checkpoint_format: str, execution: ExecutionPlan, *, recurrent: bool
) -> Way:
    switches = {
        RECURRENT: recurrent,
        "chunked_prefill": execution.chunked_prefill,
        "prefix_caching": execution.prefix_caching,
    }
    return Way(
        capability=capability,
        attention=execution.attention_backend or "none",
        format=checkpoint_format,
        weights=execution.weights,
        features=frozenset(name for name, on in switches.items() if on),
    )


def _name(capability: Capability) -> str:
    return f"sm_{capability[0]}{capability[1]}"
