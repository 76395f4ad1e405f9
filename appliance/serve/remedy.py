"""What a diagnosis of memory says to a person: the sum behind it, and changes of the file.

Numbers come from the engine's own lines. A change is a key and a value that the file accepts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.serve.ladder import FEWEST_BATCHED_TOKENS, FEWEST_SEQUENCES, SAFER_UTILIZATION

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from appliance.serve.diagnose import Diagnosis

Value = bool | int | float
Change = tuple[str, Value]

MOST_UTILIZATION = 0.90
"""What the plan takes by itself; more is never proposed."""

CONTEXT_STEP = 16
_DEFAULT_TOKENS, _DEFAULT_SEQUENCES = 2048, 16

_NUMBER = r"(-?[\d.]+)"
_READINGS = {
    "utilization": rf"'gpu_memory_utilization': {_NUMBER}",
    "tokens": rf"'max_num_batched_tokens': {_NUMBER}",
    "sequences": rf"'max_num_seqs': {_NUMBER}",
    "requested": rf"Requested memory: [\d.]+ \(util\), {_NUMBER} GiB",
    "weights": rf"Model loading took {_NUMBER} GiB",
    "available": rf"Available KV cache memory: {_NUMBER} GiB",
    "needed": rf"\({_NUMBER} GiB KV cache is needed",
}
_EAGER = re.compile(r"'enforce_eager': True|enforce_eager=True")


@dataclass(frozen=True)
class Advice:
    """What to do about a shortage of memory.

    Attributes:
        equation: The sum in GiB, empty where the log has no numbers.
        changes: Key and value, the least painful first; each is one change of the file.
    """

    equation: str = ""
    changes: tuple[Change, ...] = ()


def advise(diagnosis: Diagnosis, lines: Sequence[str]) -> Advice:
    """Return the advice behind a diagnosis, an empty one for causes that are no settings."""
    steps = _STEPS.get(diagnosis.code)
    if steps is None:
        return Advice()
    seen = _read(lines)
    facts = {name: float(text) for name, text in diagnosis.facts.items() if _is_number(text)}
    changes = [change for step in steps for change in step(seen | facts)]
    return Advice(_equation(seen), tuple(changes))


def patch_of(change: Change) -> dict[str, dict[str, Value]]:
    """Return a change as the mapping that is merged into the file."""
    section, _, key = change[0].partition(".")
    return {section: {key: change[1]}}


def _read(lines: Sequence[str]) -> dict[str, float]:
    seen: dict[str, float] = {}
    for line in lines:
        for name, pattern in _READINGS.items():
            match = re.search(pattern, line)
            if match is not None and _is_number(match[1]):
                seen[name] = float(match[1])
        if _EAGER.search(line):
            seen["eager"] = 1.0
    return seen


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _equation(seen: Mapping[str, float]) -> str:
    """Return `requested - weights - all else = available`, as far as the numbers go."""
    if "available" not in seen:
        return ""
    share = f" (utilization {seen['utilization']:g})" if "utilization" in seen else ""
    weights = f" - {seen['weights']:g} weights" if "weights" in seen else ""
    whole = {"requested", "weights"} <= seen.keys()
    start = f"{seen['requested']:g} requested{share}" if whole else f"share of the GPU{share}"
    others = " - activations, graphs and others"
    if whole:
        rest = seen["requested"] - seen["weights"] - seen["available"]
        others = f" - {rest:.2f} activations, graphs and others"
    need = f", {seen['needed']:g} needed" if "needed" in seen else ""
    return f"GiB: {start}{weights}{others} = {seen['available']:g} for the KV cache{need}"


def _raise_share(seen: Mapping[str, float]) -> Iterable[Change]:
    if seen.get("utilization", MOST_UTILIZATION) < MOST_UTILIZATION:
        yield "memory.gpu_memory_utilization", MOST_UTILIZATION


def _lower_share(seen: Mapping[str, float]) -> Iterable[Change]:
    bound = seen.get("utilization", MOST_UTILIZATION)
    if "free_gib" in seen and "total_gib" in seen:
        bound = min(bound, seen["free_gib"] / seen["total_gib"])
    lower = next((each for each in SAFER_UTILIZATION if each < bound), None)
    if lower is not None:
        yield "memory.gpu_memory_utilization", lower


def _eager(seen: Mapping[str, float]) -> Iterable[Change]:
    if "eager" not in seen:
        yield "execution.enforce_eager", True


def _fewer_tokens(seen: Mapping[str, float]) -> Iterable[Change]:
    tokens = int(seen.get("tokens", _DEFAULT_TOKENS)) // 2
    if tokens >= FEWEST_BATCHED_TOKENS:
        yield "memory.max_num_batched_tokens", tokens


def _fewer_sequences(seen: Mapping[str, float]) -> Iterable[Change]:
    sequences = int(seen.get("sequences", _DEFAULT_SEQUENCES)) // 2
    if sequences >= FEWEST_SEQUENCES:
        yield "memory.max_num_seqs", sequences


def _estimated_context(seen: Mapping[str, float]) -> Iterable[Change]:
    length = int(seen.get("estimated_max_model_len", 0)) // CONTEXT_STEP * CONTEXT_STEP
    if length >= CONTEXT_STEP:
        yield "model.max_model_len", length


_Step = Callable[[Mapping[str, float]], "Iterable[Change]"]
_LESS: tuple[_Step, ...] = (_eager, _fewer_tokens, _fewer_sequences)
_STEPS: dict[str, tuple[_Step, ...]] = {
    "NO_KV_MEMORY": (_raise_share, *_LESS),
    "KV_TOO_SMALL": (_estimated_context, _raise_share, *_LESS),
    "CUDA_OOM": (_lower_share, *_LESS),
    "GRAPH_OOM": (_eager, _lower_share),
    "GRAPH_CAPTURE": (_eager,),
    "GPU_BUSY": (_lower_share,),
}
