"""Bytes of weights a rank, held against a count over the tensors by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from appliance.checkpoint.read import summarize
from appliance.checkpoint.summary import CheckpointSummary
from appliance.plan.split import Split
from appliance.plan.weights import WeightForm, weight_items

CPU, GPU = WeightForm(4, packed=False), WeightForm(2, packed=True)
HYBRID: dict[str, object] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attn_output_gate": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


def total(summary: CheckpointSummary, split: Split, rank: int, form: WeightForm) -> int:
    return sum(item.bytes for item in weight_items(summary, split, rank, form))


def held(hollow: ModuleType, config: dict[str, object], *, ranks: int, size: int) -> int:
    """Return the bytes a rank holds when every linear is decoded, counted name by name."""
    made, count = hollow.model(config), 0
    whole = re.compile(r".*(layernorm|norm|mlp\.gate|shared_expert_gate)(\.weight)?$")
    tensors = {f"{name}.weight": shape for name, shape in made.linears.items()}
    tensors |= {name: shape for name, (_, shape) in made.tensors.items()}
    for name, shape in tensors.items():
        elements = 1
        for extent in shape:
            elements *= extent
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            elements = 128 * shape[1]
        each = 4 if name.endswith("A_log") else size
        module = name.removesuffix(".weight")
        count += elements * each // (1 if whole.match(module) else ranks)
    return count


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_decoded_weights_equal_a_count_by_name(
    tmp_path: Path, hollow: ModuleType, ranks: int, size: int
) -> None:
    tensors = hollow.quantized(hollow.model(HYBRID))
    summary = summarize(hollow.write(tmp_path, hollow.compressed(HYBRID), tensors))

    found = total(summary, Split(ranks), 0, WeightForm(size, packed=False))

    assert found == held(hollow, HYBRID, ranks=ranks, size=size)


def test_packed_weights_are_codes_scales_and_a_factor_a_row(
    tiny: Callable[..., CheckpointSummary],
) -> None:
    items = {item.name: item.bytes for item in weight_items(tiny(head_dim=16), Split(2), 0, GPU)}

    weights = 3 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 96 * 64)
    rows = 3 * ((64 + 2 * 32 + 2 * 96) // 2 + 64 + 64)
    assert items["weights.codes"] == weights // 2 // 2
    assert items["weights.block_scales"] == weights // 16 // 2
    assert items["weights.globals"] == rows * 4
    assert items["weights.embedding"] == items["weights.lm_head"] == 128 * 64 * 2 // 2


def test_stages_hold_embedding_and_head_at_the_ends(
    tiny: Callable[..., CheckpointSummary],
) -> None:
    summary = tiny()

    first, last = (weight_items(summary, Split(1, 2), rank, GPU) for rank in range(2))

    assert "weights.embedding" in {item.name for item in first}
    assert "weights.lm_head" not in {item.name for item in first}
    assert "weights.lm_head" in {item.name for item in last}
    assert "weights.embedding" not in {item.name for item in last}


def test_stages_together_hold_the_whole_model(tiny: Callable[..., CheckpointSummary]) -> None:
    summary = tiny()

    parts = [total(summary, Split(1, 2), rank, CPU) for rank in range(2)]

    assert sum(parts) == total(summary, Split(), 0, CPU)


def test_tied_head_takes_nothing_until_the_ends_are_two_ranks(
    tiny: Callable[..., CheckpointSummary],
) -> None:
    tied, untied = tiny(tie_word_embeddings=True), tiny()
    table = 128 * 64 * 4

    assert total(tied, Split(), 0, CPU) == total(untied, Split(), 0, CPU) - table
    assert total(tied, Split(1, 2), 1, CPU) == total(untied, Split(1, 2), 1, CPU)


def test_replicated_kv_heads_are_whole_on_every_rank(
    tiny: Callable[..., CheckpointSummary],
) -> None:
    one = tiny(num_key_value_heads=1, head_dim=16)

    cut = {item.name: item.bytes for item in weight_items(one, Split(2), 0, GPU)}

    rows = 64 // 2 + 2 * 16 + 2 * 96 // 2
    assert cut["weights.globals"] == 3 * 4 * (rows + 64 + 64)


def test_weights_of_quasar_are_the_public_figure(
    public: Callable[[str], CheckpointSummary],
) -> None:
    summary = public("quasar-27b")

    whole, half = total(summary, Split(), 0, GPU), total(summary, Split(2), 0, GPU)

    assert whole == pytest.approx(18.8e9, rel=0.002)
    assert half == pytest.approx(9.4e9, rel=0.002)
