"""The site table: which names are quantized together, which stay dense, which nobody knows."""

from __future__ import annotations

import pytest

from appliance.quantize.sites import ARCHITECTURES, Site

QKV = tuple(f"model.layers.3.self_attn.{part}_proj" for part in "qkv")


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_site_table_of_every_family_fuses_query_key_and_value(model_type: str) -> None:
    prefix = "language_model." if model_type in {"qwen3_5", "qwen3_5_moe"} else ""
    parts = tuple(name.replace("model.", f"model.{prefix}") for name in QKV)

    sites = {ARCHITECTURES[model_type].site_of(f"{part}.weight") for part in parts}

    assert sites == {Site(f"model.{prefix}layers.3.self_attn.qkv_proj", parts)}


@pytest.mark.parametrize(
    ("model_type", "module", "fused"),
    [
        ("llama", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_up_proj"),
        ("llama", "model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj"),
        ("qwen2", "model.layers.11.self_attn.o_proj", "model.layers.11.self_attn.o_proj"),
        (
            "qwen3_moe",
            "model.layers.0.mlp.experts.17.gate_proj",
            "model.layers.0.mlp.experts.17.gate_up_proj",
        ),
        (
            "qwen3_next",
            "model.layers.0.mlp.shared_expert.up_proj",
            "model.layers.0.mlp.shared_expert.gate_up_proj",
        ),
        (
            "qwen3_next",
            "model.layers.0.linear_attn.in_proj_qkvz",
            "model.layers.0.linear_attn.in_proj_qkvz",
        ),
        (
            "qwen3_5",
            "model.language_model.layers.0.linear_attn.in_proj_z",
            "model.language_model.layers.0.linear_attn.in_proj_qkvz",
        ),
        (
            "qwen3_5_text",
            "model.layers.0.linear_attn.out_proj",
            "model.layers.0.linear_attn.out_proj",
        ),
    ],
)
def test_site_table_names_the_fused_matrix(model_type: str, module: str, fused: str) -> None:
    site = ARCHITECTURES[model_type].site_of(f"{module}.weight")

    assert site is not None
    assert site.name == fused
    assert module in site.parts


def test_experts_of_one_layer_are_sites_of_their_own() -> None:
    table = ARCHITECTURES["qwen3_moe"]

    names = [
        table.site_of(f"model.layers.0.mlp.experts.{expert}.gate_proj.weight")
        for expert in range(3)
    ]

    assert len({site.name for site in names if site}) == 3


@pytest.mark.parametrize(
    ("model_type", "tensor", "ignore"),
    [
        ("llama", "model.embed_tokens.weight", ""),
        ("llama", "lm_head.weight", ""),
        ("llama", "model.norm.weight", ""),
        ("llama", "model.layers.4.input_layernorm.weight", ""),
        ("qwen2", "model.layers.4.self_attn.q_proj.bias", ""),
        ("qwen3", "model.layers.4.self_attn.q_norm.weight", ""),
        ("qwen3_moe", "model.layers.4.mlp.gate.weight", r"re:.*\.mlp\.gate$"),
        (
            "qwen3_5_moe",
            "model.language_model.layers.4.mlp.shared_expert_gate.weight",
            r"re:.*\.shared_expert_gate$",
        ),
        (
            "qwen3_5",
            "model.language_model.layers.4.linear_attn.in_proj_a.weight",
            r"re:.*\.linear_attn\.in_proj_(a|b|ba)$",
        ),
        ("qwen3_5", "model.language_model.layers.4.linear_attn.conv1d.weight", ""),
        ("qwen3_5", "model.language_model.layers.4.linear_attn.A_log", ""),
        ("qwen3_5", "model.visual.blocks.0.attn.qkv.weight", "re:.*visual.*"),
        ("qwen3_5", "mtp.layers.0.self_attn.q_proj.weight", "re:.*mtp.*"),
        ("qwen3_next", "mtp.fc.weight", "re:.*mtp.*"),
    ],
)
def test_site_table_keeps_the_tensor_dense(model_type: str, tensor: str, ignore: str) -> None:
    group = ARCHITECTURES[model_type].dense_group(tensor)

    assert group is not None
    assert group.ignore == ignore


@pytest.mark.parametrize(
    ("model_type", "tensor"),
    [
        ("llama", "model.layers.0.self_attn.qkv_proj.weight"),
        ("llama", "model.layers.0.mlp.experts.0.up_proj.weight"),
        ("llama", "model.layers.0.linear_attn.out_proj.weight"),
        ("qwen3_moe", "model.layers.0.mlp.experts.gate_proj"),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_z.weight"),
        ("qwen2", "model.visual.blocks.0.attn.qkv.weight"),
        ("mistral", "evil.model.layers.0.mlp.up_proj.weight.model.norm.weight"),
    ],
)
def test_site_table_knows_nothing_of_the_tensor(model_type: str, tensor: str) -> None:
    table = ARCHITECTURES[model_type]

    assert table.site_of(tensor) is None
    assert table.dense_group(tensor) is None
    assert not table.is_stack(tensor)
