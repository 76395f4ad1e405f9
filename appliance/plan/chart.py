"""The plan for people: a bar a card, the decisions with their reasons, what else would fit."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from appliance.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.plan.launch_plan import LaunchPlan, RankBudget

NARROWEST = 40
WIDEST = 120

_GROUPS = (
    ("weights", ("weights.",), "#", "█"),
    ("KV cache", ("kv_cache",), "=", "▒"),
    ("recurrent state", ("gdn_state",), "~", "▓"),
    ("activations", ("activations",), "+", "◆"),
    ("fixed", ("cuda_", "comm_", "process"), "o", "●"),
)
_INDENT = "    "
_FREE = (".", "·")


def chart(plan: LaunchPlan, *, width: int, unicode: bool) -> str:
    """Return the memory of each rank's device as bars with a legend.

    Args:
        plan: The plan.
        width: Columns of the terminal.
        unicode: Block characters instead of ASCII.
    """
    width = max(NARROWEST, min(width, WIDEST))
    lines: list[str] = []
    for budget in plan.memory.ranks:
        lines += _rank(plan, budget, width, unicode=unicode)
    shown = [group for group in _GROUPS if any(_bytes(b, group[1]) for b in plan.memory.ranks)]
    legend = [f"{group[3] if unicode else group[2]} {group[0]}" for group in shown]
    legend.append(f"{_FREE[unicode]} left to driver and others")
    return "\n".join([*lines, *_wrapped(legend, width)]) + "\n"


def _rank(plan: LaunchPlan, budget: RankBudget, width: int, *, unicode: bool) -> Iterator[str]:
    place = f"CPU rank {budget.rank}"
    if plan.execution.device == "cuda":
        place = f"GPU {plan.parallel.gpu_indexes[budget.rank]}"
    if plan.parallel.pipeline_parallel > 1:
        place += f", layers {budget.layers[0]}-{budget.layers[1] - 1}"
    share = f"{budget.used_bytes / budget.total_bytes:.0%} of {format_bytes(budget.total_bytes)}"
    yield f"{place}: {format_bytes(budget.used_bytes)}, {share}"
    yield f"[{_bar(budget, width - 2, unicode=unicode)}]"
    parts = [
        f"{name} {format_bytes(count)}"
        for name, prefixes, _, _ in _GROUPS
        if (count := _bytes(budget, prefixes))
    ]
    yield from _wrapped(parts, width)


def _bar(budget: RankBudget, width: int, *, unicode: bool) -> str:
    """Return exactly `width` characters; ends are rounded, so that the shares add up."""
    bar, position = "", 0
    for _, prefixes, plain, block in _GROUPS:
        position += _bytes(budget, prefixes)
        end = min(width, round(position * width / max(budget.total_bytes, position, 1)))
        bar += (block if unicode else plain) * (end - len(bar))
    return bar + _FREE[unicode] * (width - len(bar))


def _bytes(budget: RankBudget, prefixes: tuple[str, ...]) -> int:
    return sum(item.bytes for item in budget.items if item.name.startswith(prefixes))


def _wrapped(parts: list[str], width: int) -> Iterator[str]:
    line = "  "
    for part in parts:
        if len(line) + len(part) > width and line.strip():
            yield line.rstrip(" ,")
            line = "  "
        line += f"{part}, "
    yield line.rstrip(" ,")


def report(plan: LaunchPlan, *, width: int, unicode: bool) -> str:
    """Return the whole plan for people.

    Args:
        plan: The plan.
        width: Columns of the terminal.
        unicode: Block characters instead of ASCII.
    """
    model, memory = plan.model, plan.memory
    producer = "" if model.producer == "none" else f" by {model.producer}"
    head = (
        f"{model.served_name}: {model.architecture}, {model.format}{producer}\n"
        f"{plan.parallel.kind} on {plan.execution.device}, context of {model.max_model_len} "
        f"tokens, cache of {memory.kv_capacity_tokens} tokens for {memory.max_num_seqs} sequences\n"
    )
    parts = [
        head,
        chart(plan, width=width, unicode=unicode),
        _decisions(plan, max(NARROWEST, width)),
    ]
    if plan.alternatives:
        parts.append(_alternatives(plan))
    if plan.warnings:
        parts.append("".join(f"warning: {warning}\n" for warning in plan.warnings))
    return "\n".join(parts)


def _decisions(plan: LaunchPlan, width: int) -> str:
    """One line each; where one would be too long, the reasons go below their values."""
    left = max((len(f"{each.key} = {each.value}") for each in plan.decisions), default=0)
    beside = [f"{f'{each.key} = {each.value}':<{left}}  {each.reason}" for each in plan.decisions]
    if all(len(line) <= width for line in beside):
        return "\n".join(beside) + "\n"
    lines: list[str] = []
    for each in plan.decisions:
        lines.append(f"{each.key} = {each.value}")
        lines += textwrap.wrap(
            each.reason, width, initial_indent=_INDENT, subsequent_indent=_INDENT
        )
    return "\n".join(lines) + "\n"


def _alternatives(plan: LaunchPlan) -> str:
    lines = ["Alternatives:"]
    for each in plan.alternatives:
        text = f"context of {each.max_model_len} tokens, cache of {each.kv_capacity_tokens} tokens"
        if each.missing_bytes:
            text = f"does not fit, {format_bytes(each.missing_bytes)} are missing"
        lines.append(f"  {each.split}: {text}")
    return "\n".join(lines) + "\n"
