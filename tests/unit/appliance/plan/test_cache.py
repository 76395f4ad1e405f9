"""Cache blocks and tokens, held against what vLLM 0.27.1 reported on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from appliance.checkpoint.summary import CheckpointSummary, Geometry
from appliance.plan.cache import CacheLayout, cache_layout
from appliance.plan.split import Split

GIB = 1024**3


def geometry(**changes: object) -> Geometry:
    """Return the shape of the small models that vLLM was asked with."""
    fields: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "num_layers": 4,
        "attention_layers": 4,
        "recurrent_layers": 0,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
        "max_position": 2048,
        "tied_embeddings": True,
    }
    return Geometry(**(fields | changes))


def layout(
    shape: Geometry, split: Split | None = None, *, size: int = 4, block: int = 16
) -> CacheLayout:
    return cache_layout(
        shape,
        split or Split(),
        element_bytes=size,
        block_tokens=block,
        prefix_caching=True,
        step_tokens=2048,
    )


@pytest.mark.parametrize("block", [16, 64])
def test_capacity_is_what_vllm_reported(block: int) -> None:
    made = layout(geometry(), block=block)

    assert made.capacity_tokens(made.blocks((GIB,)), 2048) == 262_144


def test_capacity_of_the_demo_model_is_what_vllm_reported() -> None:
    made = layout(geometry(num_layers=30, attention_layers=30, num_kv_heads=3))

    blocks = made.blocks((2 * GIB,))

    assert blocks == 2 * GIB // (2 * 3 * 64 * 4 * 16) // 30
    assert made.capacity_tokens(blocks, 8192) == blocks * 16 == 46_592


def test_longest_sequence_is_cut_to_whole_blocks() -> None:
    made = layout(geometry())

    assert made.longest(3, 2048) == 48
    assert made.longest(1000, 2048) == 2048
    assert made.longest(0, 2048) == 0


def test_pools_of_two_stages_hold_what_the_smaller_holds() -> None:
    made = layout(geometry(), Split(1, 2))

    assert made.depths == (2, 2)
    assert made.blocks((GIB, GIB // 2)) == made.blocks((GIB // 2, GIB))


def test_negative_room_holds_no_block() -> None:
    assert layout(geometry()).blocks((-5,)) == 0


def test_replicated_kv_heads_take_a_whole_head_a_rank() -> None:
    cut = layout(geometry(num_kv_heads=2), Split(4))

    assert cut.page_bytes == 2 * 1 * 64 * 4 * 16


def test_window_bounds_what_a_sequence_needs() -> None:
    made = layout(geometry(sliding_window=100))

    assert made.blocks_for(10_000) == -(-(99 + 2048) // 16) + 1


def test_hybrid_block_holds_a_state(public: Callable[[str], CheckpointSummary]) -> None:
    made = layout(public("quasar-27b").geometry, size=2)

    state = 48 * 128 * 128 * 4 + 3 * (2 * 2048 + 6144) * 2
    assert made.block_tokens == 784
    assert made.page_bytes == 784 * 4096 >= state > (784 - 16) * 4096
    assert (made.depths, made.attention_groups, made.state_blocks) == ((16,), 1, 6)


@pytest.mark.parametrize(
    ("block", "prefixes", "tokens"), [(16, True, 710_070), (32, False, 838_784)]
)
def test_capacity_of_a_hybrid_is_what_vllm_reported(
    block: int, tokens: int, *, prefixes: bool
) -> None:
    shape = geometry(
        num_layers=8,
        attention_layers=2,
        recurrent_layers=6,
        state_elements=4 * 64 * 64,
        conv_elements=3 * (2 * 2 * 64 + 4 * 64),
        recurrent_at=(0, 1, 2, 4, 5, 6),
    )

    made = cache_layout(
        shape,
        Split(),
        element_bytes=2,
        block_tokens=block,
        prefix_caching=prefixes,
        step_tokens=2048,
    )

    assert made.state_blocks == (6 if prefixes else 3)
    assert made.capacity_tokens(made.blocks((GIB,)), 2048) == tokens


def test_hybrid_groups_of_nearly_equal_kinds_are_padded() -> None:
    shape = geometry(
        num_layers=5,
        attention_layers=2,
        recurrent_layers=3,
        state_elements=64,
        recurrent_at=(0, 2, 4),
    )

    made = layout(shape)

    assert (made.depths, made.attention_groups) == ((2,), 1)
    assert made.state_blocks == 2 * 2
