"""Tiny random hybrids of the Qwen3.5 family: gated delta networks and gated attention.

`producers` is the module of the other tiny models, handed in by whoever loads this one by its path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

Array = np.ndarray
VOCABULARY = 500
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attn_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": False,
    "mamba_ssm_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
SEEING: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": HYBRID
    | {
        "rope_parameters": HYBRID["rope_parameters"]
        | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    },
    "vision_config": {
        "model_type": "qwen3_5",
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": HYBRID["hidden_size"],
        "num_position_embeddings": 16,
    },
    "tie_word_embeddings": False,
    "image_token_id": 496,
    "video_token_id": 497,
    "vision_start_token_id": 498,
    "vision_end_token_id": 499,
}
"""The same text model as part of one for images, as checkpoints of the family are."""
HYBRID_MOE: dict[str, Any] = HYBRID | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
    "norm_topk_prob": True,
}
NEXT: dict[str, Any] = HYBRID_MOE | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "pad_token_id": 0,
}
"""Its projections are stored together, key head by key head."""
SEEN = "model.language_model."
KEPT = (
    *("in_proj_a", "in_proj_b", "in_proj_ba", "embed_tokens", "lm_head", "mtp.fc"),
    *("mlp.gate", "shared_expert_gate"),
)
"""Matrices that the family's producers leave dense."""
# Parts of one fused matrix with globals so far apart that no max() could serve them.
SPREAD = {"in_proj_z": 2.7, "q_proj": 1.0, "k_proj": 0.3, "v_proj": 2.5, "up_proj": 3.7}


def shapes(
    config: Mapping[str, Any], *, mtp: bool = False
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, those of multi-token prediction on request."""
    hidden = config["hidden_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer, kind in enumerate(config["layer_types"]):
        root = f"model.layers.{layer}"
        mixer = _delta if kind == "linear_attention" else _attention
        yield from mixer(f"{root}.{'linear' if mixer is _delta else 'self'}_attn", config)
        yield from _around(root, config)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)
    if mtp:
        yield "mtp.fc.weight", (hidden, 2 * hidden)
        yield from _attention("mtp.layers.0.self_attn", config)
        yield from _around("mtp.layers.0", config)
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield f"mtp.{norm}.weight", (hidden,)


def _delta(root: str, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = heads * config["linear_value_head_dim"]
    parts = {"qkv": 2 * key + value, "z": value, "b": heads, "a": heads}
    if config["model_type"] == "qwen3_next":
        parts = {"qkvz": 2 * key + 2 * value, "ba": 2 * heads}
    for name, rows in parts.items():
        yield f"{root}.in_proj_{name}.weight", (rows, hidden)
    yield f"{root}.out_proj.weight", (hidden, value)
    yield f"{root}.conv1d.weight", (2 * key + value, 1, config["linear_conv_kernel_dim"])
    yield f"{root}.A_log", (heads,)
    yield f"{root}.dt_bias", (heads,)
    yield f"{root}.norm.weight", (config["linear_value_head_dim"],)


def _attention(root: str, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    for name, rows in (("q", 2 * queries), ("k", keys), ("v", keys)):
        yield f"{root}.{name}_proj.weight", (rows, hidden)
    yield f"{root}.o_proj.weight", (hidden, queries)
    for name in "qk":
        yield f"{root}.{name}_norm.weight", (head,)


def _around(root: str, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config["hidden_size"]
    if "num_experts" in config:
        experts, width = config["num_experts"], config["moe_intermediate_size"]
        yield f"{root}.mlp.gate.weight", (experts, hidden)
        yield f"{root}.mlp.shared_expert_gate.weight", (1, hidden)
        shared = config["shared_expert_intermediate_size"]
        yield from _mlp(f"{root}.mlp.shared_expert", hidden, shared)
        for expert in range(experts):
            yield from _mlp(f"{root}.mlp.experts.{expert}", hidden, width)
    else:
        yield from _mlp(f"{root}.mlp", hidden, config["intermediate_size"])
    for name in ("input", "post_attention"):
        yield f"{root}.{name}_layernorm.weight", (hidden,)


def _mlp(root: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in ("gate", "up"):
        yield f"{root}.{name}_proj.weight", (width, hidden)
    yield f"{root}.down_proj.weight", (hidden, width)


def values(name: str, shape: tuple[int, ...], numbers: np.random.Generator) -> Array:
    """Random weights of the size that training leaves: some heads forget at once, others late."""
    module, _, last = name.rpartition(".")
    if last == "A_log":
        found = np.log(numbers.uniform(0.02, 1.5, shape))
    elif last == "dt_bias":
        found = numbers.normal(0.0, 0.7, shape)
    elif "conv1d" in name:
        found = numbers.normal(0.0, 0.5, shape)
    elif module.endswith("linear_attn.norm"):
        found = numbers.uniform(0.5, 1.5, shape)
    elif len(shape) == 1:  # these norms multiply by one more than they store
        found = numbers.uniform(-0.4, 0.4, shape)
    else:
        found = numbers.normal(0.0, 0.08 * SPREAD.get(module.rpartition(".")[2], 1.0), shape)
    return found.astype(np.float32)


def _with_vision(config: Mapping[str, Any], tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Move the text model to where it lies in one for images.

    Of the tower, which is not made, one matrix is packed and all others are missing.
    """
    width = config["vision_config"]["hidden_size"]
    moved = {name.replace("model.", SEEN, 1): tensor for name, tensor in tensors.items()}
    unread = np.zeros((3 * width, width // 2), np.uint8)
    return moved | {"model.visual.blocks.0.attn.qkv.weight": unread}


def make_hybrid(
    producers: ModuleType,
    root: Path,
    metadata: Mapping[str, Any],
    *,
    config: Mapping[str, Any] = HYBRID,
    kept: tuple[str, ...] = KEPT,
    mtp: bool = False,
) -> None:
    """Write one quantized hybrid to root/model and its dequantized twin, text alone, to root/twin.

    Every model has the same random weights, apart from what is quantized.
    """
    text: Mapping[str, Any] = config.get("text_config", config)
    layout = "compressed-tensors" if "config_groups" in metadata else "modelopt"
    made = producers.Checkpoint(layout)
    numbers = np.random.default_rng(20261130)
    for name, shape in shapes(text, mtp=mtp):
        module, array = name.removesuffix(".weight"), values(name, shape, numbers)
        if len(shape) == 2 and not module.endswith(kept):
            producers.add_fp4(made, module, array)
        else:
            made.tensors[name] = made.twin[name] = array
    tensors = made.tensors if text is config else _with_vision(config, made.tensors)
    ignored = [f"re:.*{name}$" for name in kept] if layout == "compressed-tensors" else []
    quantized = dict(metadata) | {"ignore": ignored or [f"*{name}" for name in kept]}
    plain = dict(config) | ({"mtp_num_hidden_layers": 1} if mtp else {})
    producers.write_checkpoint(root / "model", plain | {"quantization_config": quantized}, tensors)
    twin = {name: tensor for name, tensor in made.twin.items() if not name.startswith("mtp.")}
    producers.write_checkpoint(root / "twin", text, twin)
