"""How vLLM 0.27.1 lays out KV cache and recurrent state, and how many tokens that holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.checkpoint.summary import Geometry
    from appliance.plan.split import Split

STATE_BYTES = 4
"""The recurrent state is kept in FP32: its error grows from step to step."""

_PADDED_GROUPS_BELOW = 1.5


@dataclass(frozen=True)
class CacheLayout:
    """Blocks of one pool that every layer kind of a stage draws from.

    Attributes:
        block_tokens: Tokens of one block of an attention layer.
        page_bytes: Bytes of one block of one layer; a state is padded to the same.
        depths: Layers that share a block number, for each pipeline stage.
        attention_groups: Block tables of attention layers.
        state_blocks: Blocks of recurrent state that one sequence holds over all its tables.
        window: Attention window in tokens, None for full attention.
        step_tokens: Tokens of one engine step, which a window must hold beside itself.
    """

    block_tokens: int
    page_bytes: int
    depths: tuple[int, ...]
    attention_groups: int
    state_blocks: int
    window: int | None
    step_tokens: int

    def block_bytes(self, stage: int) -> int:
        """Return the bytes of one block over all layers of a stage."""
        return self.page_bytes * self.depths[stage]

    def blocks(self, pools: tuple[int, ...]) -> int:
        """Return the blocks that pools of so many bytes, one a stage, hold together."""
        return min(
            max(0, pool) // self.page_bytes // depth
            for pool, depth in zip(pools, self.depths, strict=True)
            if depth
        )

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks one sequence of this length needs."""
        if self.window is not None:
            tokens = min(tokens, self.window - 1 + self.step_tokens)
            # One more, since a window seldom begins where a block begins.
            return (-(-tokens // self.block_tokens) + 1) * self.attention_groups
        return -(-tokens // self.block_tokens) * self.attention_groups + self.state_blocks

    def capacity_tokens(self, blocks: int, longest: int) -> int:
        """Return the tokens that the engine will report for sequences of the longest length."""
        return int(blocks / self.blocks_for(longest) * longest)

    def longest(self, blocks: int, limit: int) -> int:
        """Return the longest sequence that so many blocks hold, at most the limit, 0 if none."""
        if blocks >= self.blocks_for(limit):
            return limit
        spare = self.state_blocks if self.window is None else 1
        usable = (blocks - spare) // self.attention_groups
        return max(0, min(limit, usable * self.block_tokens))


def cache_layout(
    geometry: Geometry,
    split: Split,
    *,
    element_bytes: int,
    block_tokens: int,
    prefix_caching: bool,
    step_tokens: int,
) -> CacheLayout:
    """Return the layout of one model cut one way.

    Args:
        geometry: Shape of the model.
        split: How it is cut.
        element_bytes: Bytes of one number in the KV cache.
        block_tokens: Tokens of one block as configured; hybrids raise it until a page holds a
            recurrent state.
        prefix_caching: With it the engine holds two states a sequence, without it one.
        step_tokens: Tokens of one engine step.
    """
    token_bytes = 2 * split.kv_heads(geometry.num_kv_heads) * geometry.head_dim * element_bytes
    recurrent = set(geometry.recurrent_at)
    everywhere = range(geometry.num_layers)
    attention = [layer for layer in everywhere if layer not in recurrent]
    stages = [split.layers(stage, geometry.num_layers) for stage in range(split.pipeline)]
    if not recurrent:
        depths = tuple(len(stage) for stage in stages)
        page = block_tokens * token_bytes
        window = geometry.sliding_window
        return CacheLayout(block_tokens, page, depths, 1, 0, window, step_tokens)
    state = (
        geometry.state_elements * STATE_BYTES + geometry.conv_elements * element_bytes
    ) // split.tensor
    block_tokens *= -(-state // (block_tokens * token_bytes))
    groups = _groups([attention, sorted(recurrent)])
    depths = tuple(
        max(sum(layer in stage for layer in group) for group in groups) for stage in stages
    )
    tables = [sum(group[0] in kind for group in groups) for kind in (set(attention), recurrent)]
    states = tables[1] * (2 if prefix_caching else 1)
    page = block_tokens * token_bytes
    return CacheLayout(block_tokens, page, depths, tables[0], states, None, step_tokens)


def _groups(kinds: list[list[int]]) -> list[list[int]]:
    """Deal layers of each kind into groups of one size, as the engine does."""
    filled = [kind for kind in kinds if kind]
    size, most = min(map(len, filled)), max(map(len, filled))
    if most < size * _PADDED_GROUPS_BELOW:
        size = most
    groups: list[list[int]] = []
    for kind in filled:
        count = math.ceil(len(kind) / size)
        groups += [kind[first::count] for first in range(count)]
    return groups
