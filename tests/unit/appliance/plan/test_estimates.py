"""Shares of memory that no header tells, held against sums made by hand."""

from __future__ import annotations

import pytest

from appliance.checkpoint.summary import Geometry
from appliance.plan.estimates import activation_item
from appliance.plan.split import Split

MIB = 1024**2
SHAPE = Geometry(
    architecture="LlamaForCausalLM",
    model_type="llama",
    num_layers=4,
    attention_layers=4,
    recurrent_layers=0,
    hidden_size=256,
    intermediate_size=1024,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=6400,
    max_position=2048,
    tied_embeddings=True,
)
LAYERS = 3 * 1024 * 1024 * 2
"""Bytes of the MLP's activations for 1024 tokens, its widest part."""


@pytest.mark.parametrize(
    ("sequences", "widest"),
    [(8, LAYERS), (37, LAYERS), (38, 38 * 6400 * 26), (256, 256 * 6400 * 26)],
)
def test_activations_hold_a_step_of_layers_or_a_step_of_penalties(
    sequences: int, widest: int
) -> None:
    item = activation_item(SHAPE, Split(), element_bytes=2, step_tokens=1024, sequences=sequences)

    streams, rotary = 4 * 1024 * 256 * 2, 2048 * 64 * 2
    logits = 3 * sequences * 6400 * 4
    assert item.bytes == streams + widest + logits + rotary + 64 * MIB
