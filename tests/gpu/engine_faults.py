"""What does not hold in the results of the engine's runs, in words."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

GAP = 0.05
"""Log-probabilities of the engine and of what judges it may differ by this much."""

COARSE_AGREEMENT = 0.5
"""Share of a coarse way's tokens that must be the twin's. Its activations have 4 bits."""

COARSE_CORRELATION = 0.8
"""Of a coarse way's log-probabilities with those of the first way, over a prompt's tokens."""

LAYERS = re.compile(r"causal_conv1d|chunk_|delta_rule|gating|l2norm|layer_norm|mrope|qk_rmsnorm")
"""Kernels of Triton in which upstream computes a layer of a hybrid; the library's stand there."""


SELF_JUDGED = ("stack", "long")
"""Models without a twin: their ways judge each other."""

ONE_CARD, PIPELINE = "one card", "pipeline parallel 2"


def faults(results: dict[str, Any]) -> list[str]:
    """Name everything that does not hold."""
    if not results:
        return ["nothing was run"]
    wrong = []
    for name, found in results.items():
        if found["exit"] != 0:
            wrong.append(f"{name}: exit {found['exit']}")
        wrong += operation_faults(found) if name == "operations" else model_faults(name, found)
    return wrong


def operation_faults(found: dict[str, Any]) -> list[str]:
    """Parts whose operations are not as exact as they must be."""
    parts = {part: value for part, value in found.items() if isinstance(value, dict)}
    return [f"operations {part}: {value['bad']}" for part, value in parts.items() if value["bad"]]


def model_faults(name: str, found: dict[str, Any]) -> list[str]:
    """Ways of one model that failed, grew, or are too far from the twin or each other."""
    ways = found.get("ways", {})
    wrong = [
        f"{name}, {way}: {line['error'][-300:]}" for way, line in ways.items() if "error" in line
    ]
    if not ways:
        wrong.append(f"{name}: no way was run")
    if name == "stack":
        wrong += stack_faults(ways)
    if name == "long":
        wrong += unequal(name, ways, next(iter(ways), ""))
    if PIPELINE in ways:
        wrong += unequal(
            name, {PIPELINE: ways[PIPELINE], ONE_CARD: ways.get(ONE_CARD, {})}, ONE_CARD
        )
    if name == "hybrid":
        compiled = filter(LAYERS.search, found.get("triton") or ())
        wrong += [f"hybrid: Triton computed {kernel}" for kernel in compiled]
    growth = max((way.get("growth_bytes") or 0 for way in ways.values()), default=0)
    if growth > 0:
        wrong.append(f"{name}: {growth} bytes more after a thousand requests")
    if name in SELF_JUDGED:
        return wrong
    twin = found.get("twin") or {}
    wrong += [
        f"{name}, {way}: nobody judged it" for way in ways if not twin.get(way, {}).get("places")
    ]
    for way, line in twin.items():
        judge = coarse_faults if ways.get(way, {}).get("coarse") else twin_faults
        wrong += [f"{name}, {way}: {said}" for said in judge(line)]
    return wrong


def unequal(name: str, ways: dict[str, Any], first: str) -> list[str]:
    """Ways whose answers, asked one by one, are not those of the way `first`."""
    right = ways.get(first, {}).get("one", {}).get("tokens")
    return [
        f"{name}, {way}: other answers than {first}"
        for way, line in ways.items()
        if not right or line.get("one", {}).get("tokens") != right
    ]


def twin_faults(line: dict[str, Any]) -> list[str]:
    """Bounds of a way that computes what the twin does."""
    wrong = []
    if not line["largest_gap"] <= GAP:
        wrong.append(f"a gap of {line['largest_gap']}")
    if not (off := line["largest_logprob_difference"]) <= GAP:
        wrong.append(f"a log-probability that is {off} off")
    return wrong


def coarse_faults(line: dict[str, Any]) -> list[str]:
    """Whether a way that rounds activations to 4 bits still says much the same."""
    same, places = line["places"] - line["other_token"], line["places"]
    if places and same >= COARSE_AGREEMENT * places:
        return []
    return [f"the twin's token in {same} of {places} places"]


def stack_faults(ways: dict[str, Any]) -> list[str]:
    """Hold each way against the first one, by what it holds of every token of one prompt."""
    wrong = []
    first = np.array(next(iter(ways.values()), {}).get("read", ()), dtype=np.float64)
    if not (first.size > 1 and np.isfinite(first).all()):
        return ["stack: nothing to hold the ways against"]
    for way, line in ways.items():
        own = np.array(line.get("read", ()), dtype=np.float64)
        if own.shape != first.shape or not np.isfinite(own).all():
            wrong.append(f"stack, {way}: it read no log-probabilities")
        elif line.get("coarse"):
            alike = float(np.corrcoef(own, first)[0, 1])
            if not alike >= COARSE_CORRELATION:
                wrong.append(f"stack, {way}: log-probabilities that correlate by {alike:.3f}")
        elif (off := float(np.abs(own - first).max())) > GAP:
            wrong.append(f"stack, {way}: a log-probability that is {off:.3f} off")
    return wrong
