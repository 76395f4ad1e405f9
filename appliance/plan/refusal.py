"""Says why a plan does not fit, and the shortest change that would make it fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.plan.candidate import FLOOR_TOKENS
from appliance.plan.cards import cpu_cards, gpu_cards
from appliance.plan.choice import choose
from appliance.units import format_bytes
from healthchecks.assumed import assumed_host

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.checkpoint.summary import CheckpointSummary
    from appliance.config.load import LoadedConfig
    from appliance.plan.candidate import Candidate
    from appliance.plan.choice import Choice
    from healthchecks.facts import HostFacts

LARGER_HOSTS = ("1x32GiB", "2x16GiB-nvlink", "2x32GiB-nvlink", "4x32GiB-nvlink", "8x32GiB-nvlink")


def does_not_fit(
    loaded: LoadedConfig, summary: CheckpointSummary, host: HostFacts, choice: Choice
) -> ApplianceError:
    """Return the error of a choice whose best split does not fit."""
    best = choice.taken
    if best.missing_bytes == 0:
        return _cache_too_small(loaded, summary, best)
    budget = best.budgets[best.tightest]
    items = [item for item in budget.items if item.name not in ("kv_cache", "gdn_state")]
    shares = {"weights": sum(i.bytes for i in items if i.name.startswith("weights."))}
    shares |= {item.name: item.bytes for item in items if not item.name.startswith("weights.")}
    cache = budget.usable_bytes + best.missing_bytes - sum(shares.values())
    shares["cache of one sequence"] = cache
    parts = " + ".join(f"{name} {format_bytes(size)}" for name, size in shares.items() if size > 0)
    card = best.cards[best.tightest]
    place = f"gpu {card.index} ({card.name})" if card.name != "cpu" else f"cpu rank {card.index}"
    usable = format_bytes(budget.usable_bytes)
    what = f"{best.split}: {parts} must fit the {usable} that the engine may hold"
    value = format_bytes(sum(size for size in shares.values() if size > 0))
    fix = next(_remedies(loaded, summary, host), None) or "serve a smaller model"
    return ApplianceError(
        ExitCode.DOES_NOT_FIT, Fault("PLAN_DOES_NOT_FIT", place, what, value, fix)
    )


def check_captures(loaded: LoadedConfig, taken: Candidate) -> None:
    """Refuse steps of more sequences than the cache has blocks, which the engine would not capture.

    Raises:
        ApplianceError: STATE_BLOCKS (exit 32).
    """
    if taken.captures or not taken.graphs:
        return
    sequences = loaded.config.memory.max_num_seqs
    what = f"at most {taken.blocks}, the blocks of the cache, as each holds a recurrent state"
    fix = f"set it to {taken.blocks} or less, or set execution.enforce_eager: true"
    place = loaded.where("memory.max_num_seqs")
    fault = Fault("STATE_BLOCKS", place, what, str(sequences), fix)
    raise ApplianceError(ExitCode.DOES_NOT_FIT, fault)


def _cache_too_small(
    loaded: LoadedConfig, summary: CheckpointSummary, best: Candidate
) -> ApplianceError:
    """The cache of the CPU engine is stated and holds no sequence of the asked length."""
    stated = loaded.config.model.max_model_len
    limit = summary.geometry.max_position
    tokens = min(limit, FLOOR_TOKENS) if stated == "auto" else stated
    needed = best.layout.blocks_for(tokens) * best.layout.block_bytes(0) * best.split.ranks
    where, what = (
        loaded.where("memory.kv_cache_size"),
        f"{format_bytes(needed)} for {tokens} tokens",
    )
    value = format_bytes((best.pool_bytes or 0) * best.split.ranks)
    fault = Fault("PLAN_DOES_NOT_FIT", where, what, value, "set memory.kv_cache_size: auto")
    return ApplianceError(ExitCode.DOES_NOT_FIT, fault)


def _remedies(loaded: LoadedConfig, summary: CheckpointSummary, host: HostFacts) -> Iterator[str]:
    """Yield single changes that make it fit, the least painful first."""
    config = loaded.config
    open_length = _changed(loaded, "model", max_model_len="auto")
    longest = _longest(open_length, summary, host)
    if config.model.max_model_len != "auto" and longest:
        yield f"set model.max_model_len: {longest}, the longest that fits"
    for text, changed in _variants(loaded):
        if _longest(changed, summary, host):
            yield f"set {text}"
    if config.execution.device != "cpu":
        free = _changed(loaded, "parallel", gpus="all", mode="auto")
        enough = (
            spec.removesuffix("-nvlink")
            for spec in LARGER_HOSTS
            if _longest(free, summary, assumed_host(spec))
        )
        first = list(islice(enough, 2))
        if first:
            yield f"use {' or '.join(first)} of V100"
    elif config.memory.kv_cache_size != "auto":
        yield "set memory.kv_cache_size: auto"


def _variants(loaded: LoadedConfig) -> Iterator[tuple[str, LoadedConfig]]:
    memory, execution = loaded.config.memory, loaded.config.execution
    if execution.weights == "dequantized":
        yield "execution.weights: fused", _changed(loaded, "execution", weights="fused")
    if loaded.config.parallel.mode != "auto":
        yield "parallel.mode: auto", _changed(loaded, "parallel", mode="auto")
    if execution.enforce_eager is False:
        yield "execution.enforce_eager: true", _changed(loaded, "execution", enforce_eager=True)
    utilization = memory.gpu_memory_utilization
    if utilization != "auto":
        for higher in (0.9, 0.93, 0.95):
            if higher > utilization:
                text = f"memory.gpu_memory_utilization: {higher}"
                yield text, _changed(loaded, "memory", gpu_memory_utilization=higher)
    for tokens in (1024, 512):
        if max(tokens, memory.max_num_seqs) < memory.max_num_batched_tokens:
            text = f"memory.max_num_batched_tokens: {tokens}"
            yield text, _changed(loaded, "memory", max_num_batched_tokens=tokens)


def _changed(loaded: LoadedConfig, section: str, **values: object) -> LoadedConfig:
    part = getattr(loaded.config, section).model_copy(update=values)
    return replace(loaded, config=loaded.config.model_copy(update={section: part}))


def _longest(loaded: LoadedConfig, summary: CheckpointSummary, host: HostFacts) -> int:
    """Return the longest sequence a changed configuration serves, 0 if it serves none."""
    try:
        on_cpu = loaded.config.execution.device == "cpu"
        cards = cpu_cards(loaded, host) if on_cpu else gpu_cards(loaded, host)
        taken = choose(loaded, summary, cards.cards, host).taken
    except ApplianceError:
        return 0
    return taken.longest if taken.fits else 0
