"""One split of the model on given devices: budgets of its ranks, and whether the cache suffices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.plan.cache import CacheLayout, cache_layout
from appliance.plan.estimates import (
    activation_item,
    comm_item,
    context_item,
    graph_item,
    process_item,
)
from appliance.plan.launch_plan import Item, RankBudget
from appliance.plan.weights import WeightForm, weight_items
from appliance.units import GIB

if TYPE_CHECKING:
    from appliance.checkpoint.summary import CheckpointSummary
    from appliance.plan.launch_plan import Device
    from appliance.plan.split import Split

FLOOR_TOKENS = 4096
"""Shortest context worth serving when the length is left open."""

SEQUENCE_TOKENS = 2048
"""Tokens of each of `max_num_seqs` sequences that the cache should hold together."""


@dataclass(frozen=True)
class Card:
    """One device that may hold ranks.

    Attributes:
        name: UUID of the GPU, or `cpu`.
        index: NVML index, or the number of the CPU rank.
        total_bytes: Its memory.
        usable_bytes: What the engine may hold of it.
    """

    name: str
    index: int
    total_bytes: int
    usable_bytes: int


@dataclass(frozen=True)
class Demand:
    """What is asked of any split.

    Attributes:
        device: `cuda` or `cpu`.
        form: How weights are held.
        sequences: Sequences decoded together.
        step_tokens: Tokens of one engine step.
        block_tokens: Tokens of one cache block.
        prefix_caching: Reuse of equal beginnings.
        longest: Longest sequence, None if it is left open.
        graphs: CUDA graphs are captured.
        pool_bytes: Cache of one rank where it is fixed, None where it is what remains.
    """

    device: Device
    form: WeightForm
    sequences: int
    step_tokens: int
    block_tokens: int
    prefix_caching: bool
    longest: int | None
    graphs: bool
    pool_bytes: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A split with its budgets.

    Attributes:
        split: How the model is cut.
        cards: One device a rank.
        budgets: One a rank; the cache is what remains.
        layout: How the cache is laid out.
        blocks: Cache blocks that every rank has room for.
        longest: Longest sequence that is served; 0 if not even the shortest fits.
        working_set: The cache holds all sequences together at a useful length.
        captures: It has a block for each sequence of a captured step; the engine asks that of
            models with a recurrent state.
        graphs: CUDA graphs are part of the budget.
        missing_bytes: What the tightest rank lacks for one sequence, 0 if it fits.
        tightest: That rank.
        pool_bytes: Cache of one rank where it was fixed beforehand.
    """

    split: Split
    cards: tuple[Card, ...]
    budgets: tuple[RankBudget, ...]
    layout: CacheLayout
    blocks: int
    longest: int
    working_set: bool
    captures: bool
    graphs: bool
    missing_bytes: int
    tightest: int
    pool_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """One sequence of the asked length can be served."""
        return self.missing_bytes == 0 and self.longest > 0

    @property
    def capacity_tokens(self) -> int:
        """Tokens of all sequences together, as the engine reports them; 0 if nothing fits."""
        return self.layout.capacity_tokens(self.blocks, self.longest) if self.longest else 0


def evaluate(
    summary: CheckpointSummary, split: Split, cards: tuple[Card, ...], demand: Demand
) -> Candidate:
    """Budget every rank of a split; `cards` has one entry a rank."""
    layout = layout_of(summary, split, demand)
    ranks = range(split.ranks)
    fixed = [_fixed_items(summary, split, rank, demand) for rank in ranks]
    room = [cards[rank].usable_bytes - sum(item.bytes for item in fixed[rank]) for rank in ranks]
    limit = demand.longest or summary.geometry.max_position
    least = min(limit, demand.longest or FLOOR_TOKENS)
    stages = [split.stage(rank) for rank in ranks]
    if demand.pool_bytes is None:
        needed = [layout.blocks_for(least) * layout.block_bytes(stage) for stage in stages]
        pools = [min(room[r] for r in ranks if stages[r] == s) for s in range(split.pipeline)]
    else:
        needed = [demand.pool_bytes] * split.ranks
        pools = [demand.pool_bytes] * split.pipeline
    blocks = layout.blocks(tuple(pools))
    longest = layout.longest(blocks, limit)
    useful = max(1, min(longest, SEQUENCE_TOKENS))
    missing = [max(0, needed[rank] - room[rank]) for rank in ranks]
    cached = [_cache_items(layout, demand, blocks, stage) for stage in stages]
    return Candidate(
        split=split,
        cards=cards,
        budgets=tuple(
            _budget(summary, split, rank, cards[rank], (*fixed[rank], *cached[rank]))
            for rank in ranks
        ),
        layout=layout,
        blocks=blocks,
        longest=longest if longest >= least else 0,
        working_set=blocks >= demand.sequences * layout.blocks_for(useful),
        captures=not layout.state_blocks or blocks >= demand.sequences,
        graphs=demand.graphs,
        missing_bytes=max(missing),
        tightest=max(ranks, key=lambda rank: needed[rank] - room[rank]),
        pool_bytes=demand.pool_bytes,
    )


def layout_of(summary: CheckpointSummary, split: Split, demand: Demand) -> CacheLayout:
    """Return the cache layout of a split."""
    return cache_layout(
        summary.geometry,
        split,
        element_bytes=demand.form.element_bytes,
        block_tokens=demand.block_tokens,
        prefix_caching=demand.prefix_caching,
        step_tokens=demand.step_tokens,
    )


def host_pool(summary: CheckpointSummary, split: Split, demand: Demand) -> int:
    """Return the cache that one rank of the CPU engine should get: whole GiB, at least one.

    It holds the longest sequence, and all sequences together at a useful length.
    """
    layout = layout_of(summary, split, demand)
    longest = demand.longest or summary.geometry.max_position
    together = demand.sequences * layout.blocks_for(min(longest, SEQUENCE_TOKENS))
    blocks = max(layout.blocks_for(longest), together)
    most = max(layout.block_bytes(stage) for stage in range(split.pipeline))
    return max(1, -(-blocks * most // GIB)) * GIB


def _fixed_items(
    summary: CheckpointSummary, split: Split, rank: int, demand: Demand
) -> tuple[Item, ...]:
    items = [*weight_items(summary, split, rank, demand.form)]
    items.append(
        activation_item(
            summary.geometry,
            split,
            element_bytes=demand.form.element_bytes,
            step_tokens=demand.step_tokens,
            sequences=demand.sequences,
        )
    )
    if demand.device == "cpu":
        return (*items, process_item())
    items.append(context_item())
    if demand.graphs:
        items.append(graph_item(summary.geometry, demand.sequences))
    if split.ranks > 1:
        items.append(comm_item())
    return tuple(items)


def _cache_items(layout: CacheLayout, demand: Demand, blocks: int, stage: int) -> tuple[Item, ...]:
    """Divide the pool into states of all sequences and the rest; the engine shares it freely."""
    each = layout.block_bytes(stage)
    held = min(blocks, demand.sequences * layout.state_blocks)
    source = "vLLM 0.27.1, v1/core/kv_cache_utils.py"
    tokens = f"{blocks - held} blocks of {layout.block_tokens} tokens"
    items = [Item("kv_cache", (blocks - held) * each, f"{tokens}, {each} B a block", source)]
    if held:
        formula = f"{demand.sequences} sequences x {layout.state_blocks} blocks, {each} B a block"
        items.append(Item("gdn_state", held * each, formula, source))
    return tuple(items)


def _budget(
    summary: CheckpointSummary, split: Split, rank: int, card: Card, items: tuple[Item, ...]
) -> RankBudget:
    layers = split.layers(split.stage(rank), summary.geometry.num_layers)
    return RankBudget(
        rank=rank,
        device=card.name,
        total_bytes=card.total_bytes,
        usable_bytes=card.usable_bytes,
        items=items,
        layers=(layers.start, layers.stop),
    )
