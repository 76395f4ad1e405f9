"""Checkpoints that are all header: right names, shapes and sizes, and holes where weights would be.

Names and shapes are written down here family by family, without the code under test, so that both
can be held against each other.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4}
Tensors = dict[str, tuple[str, tuple[int, ...]]]

CT_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
    "dynamic": False,
}


@dataclass
class Model:
    """A configuration and the linears and other tensors that go with it."""

    config: dict[str, object]
    root: str = "model."
    tensors: Tensors = field(default_factory=dict)
    linears: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def text(self) -> dict[str, object]:
        return self.config.get("text_config", self.config)

    def size(self, key: str) -> int:
        return int(self.text[key])


def model(config: dict[str, object]) -> Model:
    """Return every tensor that the configuration's architecture has, linears apart."""
    made = Model(config, root="model.language_model." if "text_config" in config else "model.")
    hidden, vocabulary = made.size("hidden_size"), made.size("vocab_size")
    made.tensors[f"{made.root}embed_tokens.weight"] = ("BF16", (vocabulary, hidden))
    made.tensors[f"{made.root}norm.weight"] = ("BF16", (hidden,))
    if not made.text.get("tie_word_embeddings", False):
        made.linears["lm_head"] = (vocabulary, hidden)
    for layer in range(made.size("num_hidden_layers")):
        base = f"{made.root}layers.{layer}."
        made.tensors[f"{base}input_layernorm.weight"] = ("BF16", (hidden,))
        made.tensors[f"{base}post_attention_layernorm.weight"] = ("BF16", (hidden,))
        interval = made.text.get("full_attention_interval")
        if interval and (layer + 1) % int(interval):
            _gated_delta_net(made, f"{base}linear_attn.")
        else:
            _attention(made, f"{base}self_attn.")
        _feed_forward(made, f"{base}mlp.")
    if "vision_config" in config:
        made.tensors["model.visual.everything.weight"] = ("BF16", (460_000, 1000))
    return made


def _attention(made: Model, base: str) -> None:
    heads, groups = made.size("num_attention_heads"), made.size("num_key_value_heads")
    width = int(made.text.get("head_dim") or made.size("hidden_size") // heads)
    hidden = made.size("hidden_size")
    doubled = 2 if made.text.get("attn_output_gate") else 1
    rows = {"q_proj": heads * width * doubled, "k_proj": groups * width, "v_proj": groups * width}
    for name, count in rows.items():
        made.linears[f"{base}{name}"] = (count, hidden)
        if made.text["model_type"] == "qwen2":
            made.tensors[f"{base}{name}.bias"] = ("BF16", (count,))
    made.linears[f"{base}o_proj"] = (hidden, heads * width)
    if str(made.text["model_type"]).startswith("qwen3"):
        for name in ("q_norm", "k_norm"):
            made.tensors[f"{base}{name}.weight"] = ("BF16", (width,))


def _gated_delta_net(made: Model, base: str) -> None:
    key = made.size("linear_num_key_heads") * made.size("linear_key_head_dim")
    heads = made.size("linear_num_value_heads")
    value, hidden = heads * made.size("linear_value_head_dim"), made.size("hidden_size")
    rows = {
        "in_proj_qkv": 2 * key + value,
        "in_proj_z": value,
        "in_proj_a": heads,
        "in_proj_b": heads,
    }
    for name, count in rows.items():
        made.linears[f"{base}{name}"] = (count, hidden)
    made.linears[f"{base}out_proj"] = (hidden, value)
    window = made.size("linear_conv_kernel_dim")
    made.tensors[f"{base}conv1d.weight"] = ("BF16", (2 * key + value, 1, window))
    made.tensors[f"{base}A_log"] = ("F32", (heads,))
    made.tensors[f"{base}dt_bias"] = ("BF16", (heads,))
    made.tensors[f"{base}norm.weight"] = ("F32", (made.size("linear_value_head_dim"),))


def _feed_forward(made: Model, base: str) -> None:
    hidden = made.size("hidden_size")
    if "num_experts" not in made.text:
        _gated_mlp(made, base, hidden, made.size("intermediate_size"))
        return
    made.linears[f"{base}gate"] = (made.size("num_experts"), hidden)
    for expert in range(made.size("num_experts")):
        _gated_mlp(made, f"{base}experts.{expert}.", hidden, made.size("moe_intermediate_size"))
    if "shared_expert_intermediate_size" in made.text:
        made.linears[f"{base}shared_expert_gate"] = (1, hidden)
        shared = made.size("shared_expert_intermediate_size")
        _gated_mlp(made, f"{base}shared_expert.", hidden, shared)


def _gated_mlp(made: Model, base: str, hidden: int, width: int) -> None:
    made.linears[f"{base}gate_proj"] = (width, hidden)
    made.linears[f"{base}up_proj"] = (width, hidden)
    made.linears[f"{base}down_proj"] = (hidden, width)


IGNORED = [
    "lm_head",
    r"re:.*mlp\.gate$",
    r"re:.*shared_expert_gate$",
    "re:.*visual.*",
    "re:.*mtp.*",
]


def quantized(made: Model) -> Tensors:
    """Return all tensors with compressed-tensors names; what `IGNORED` names stays BF16."""
    keep = re.compile("|".join(entry.removeprefix("re:") for entry in IGNORED))
    tensors = dict(made.tensors)
    for name, (rows, columns) in made.linears.items():
        if keep.match(name):
            tensors[f"{name}.weight"] = ("BF16", (rows, columns))
            continue
        tensors[f"{name}.weight_packed"] = ("U8", (rows, columns // 2))
        tensors[f"{name}.weight_scale"] = ("F8_E4M3", (rows, columns // 16))
        tensors[f"{name}.weight_global_scale"] = ("F32", (1,))
    return tensors


def dense(made: Model) -> Tensors:
    """Return all tensors in BF16."""
    linears = {f"{name}.weight": ("BF16", shape) for name, shape in made.linears.items()}
    return made.tensors | linears


def size_of(entry: tuple[str, tuple[int, ...]]) -> int:
    """Return the bytes of one tensor."""
    count = BYTES[entry[0]]
    for size in entry[1]:
        count *= size
    return count


def write(root: Path, config: dict[str, object], tensors: Tensors, *, shards: int = 1) -> Path:
    """Write configuration, tokenizer, index and sparse shards; returns the directory."""
    root.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        write_shard(root / file, {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    index = {
        "metadata": {"total_size": sum(map(size_of, tensors.values()))},
        "weight_map": weight_map,
    }
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "config.json").write_text(json.dumps(config, indent=1))
    (root / "tokenizer.json").write_text("{}")
    (root / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return root


def write_shard(path: Path, tensors: Tensors) -> None:
    """Write one safetensors file whose data is a hole of the right length."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, entry in tensors.items():
        end = position + size_of(entry)
        header[name] = {"dtype": entry[0], "shape": list(entry[1]), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + position)


def compressed(config: dict[str, object]) -> dict[str, object]:
    """Return the configuration with compressed-tensors metadata."""
    group = {"targets": ["Linear"], "weights": CT_WEIGHTS, "input_activations": None}
    block = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": IGNORED,
        "kv_cache_scheme": None,
    }
    return config | {"quantization_config": block}


QWEN2_7B: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 131072,
}
QWEN2_14B = QWEN2_7B | {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
QWEN3_30B_A3B: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
QWEN35_35B_A3B: dict[str, object] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "vision_config": {"depth": 27},
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "attn_output_gate": True,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "mamba_ssm_dtype": "float32",
    },
}
QUASAR_27B: dict[str, object] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "vision_config": {"depth": 27},
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attn_output_gate": True,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "mamba_ssm_dtype": "float32",
    },
}

MODELS = {
    "qwen2.5-7b": QWEN2_7B,
    "qwen2.5-14b": QWEN2_14B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3.5-35b-a3b": QWEN35_35B_A3B,
    "quasar-27b": QUASAR_27B,
}


def build(root: Path, name: str, *, shards: int = 4) -> Path:
    """Write one of `MODELS`, quantized, below the directory."""
    config = MODELS[name]
    return write(root / name, compressed(config), quantized(model(config)), shards=shards)
