"""The model families that are served, as one table of how they differ, and their outlines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from appliance.checkpoint.config import EXPERTS_MAX, LAYERS_MAX
from appliance.checkpoint.faults import refuse
from appliance.checkpoint.outline import Experts, LayerOutline, Linear, Other, Outline
from appliance.checkpoint.summary import Cut, Geometry

if TYPE_CHECKING:
    from appliance.checkpoint.config import ModelConfig

FP16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True)
class Family:
    """How one architecture differs from the plain decoder.

    Attributes:
        max_position: Context limit where the configuration names none.
        head_dim: Width of a head where the configuration names none; 0 means hidden / heads.
        qkv_bias: q, k and v have a bias, whatever the configuration says.
        qk_norm: q and k are normalised per head.
        gated: q carries an output gate of its own width.
        recurrent: Linear-attention layers: none, with fused or with split input projections.
        experts: Routed experts: none, alone, or beside a shared one.
    """

    max_position: int
    head_dim: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    gated: bool = False
    recurrent: Literal["", "fused", "split"] = ""
    experts: Literal["", "routed", "shared"] = ""


_QWEN3 = Family(32_768, head_dim=128, qk_norm=True)
_QWEN3_5 = Family(32_768, head_dim=256, qk_norm=True, gated=True, recurrent="split")
_QWEN3_5_MOE = Family(
    32_768, head_dim=256, qk_norm=True, gated=True, recurrent="split", experts="shared"
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(2_048),
    "MistralForCausalLM": Family(131_072),
    "Qwen2ForCausalLM": Family(32_768, qkv_bias=True),
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": Family(32_768, qk_norm=True, experts="routed"),
    "Qwen3NextForCausalLM": Family(
        32_768, head_dim=256, qk_norm=True, gated=True, recurrent="fused", experts="shared"
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
}
"""Architecture name to family; the names are those of the engine's model registry."""


def outline(config: ModelConfig) -> Outline:
    """Return the tensors and the shape of the model that a configuration describes.

    Raises:
        ApplianceError: Exit 30 if the architecture is not served or a field is missing or wrong.
    """
    name = config.architecture
    family = FAMILIES.get(name)
    if family is None:
        known = ", ".join(FAMILIES)
        where, fix = f"{config.path} architectures", "serve a checkpoint of one of these"
        raise refuse("E_ARCHITECTURE", where, f"one of {known}", name, fix)
    recurrent_at = _recurrent_layers(config, family)
    moe_at = _moe_layers(config, family)
    geometry = _geometry(config, family, recurrent_at)
    kinds = tuple(
        f"{'recurrent' if layer in recurrent_at else 'attention'}"
        f"+{'experts' if layer in moe_at else 'mlp'}"
        for layer in range(geometry.num_layers)
    )
    layers = {kind: _layer(config, family, geometry, kind) for kind in sorted(set(kinds))}
    mtp = max(config.count("mtp_num_hidden_layers"), config.count("num_nextn_predict_layers"))
    return Outline(geometry, kinds, layers, mtp)


def _geometry(config: ModelConfig, family: Family, recurrent_at: frozenset[int]) -> Geometry:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    layers = config.integer("num_hidden_layers", largest=LAYERS_MAX)
    experts = _experts(config) if family.experts else 0
    state, conv, recurrent_heads = _state(config) if recurrent_at else (0, 0, (0, 0))
    per_layer = state * FP32_BYTES + conv * FP16_BYTES
    return Geometry(
        architecture=config.architecture,
        model_type=str(config.get("model_type")),
        num_layers=layers,
        attention_layers=layers - len(recurrent_at),
        recurrent_layers=len(recurrent_at),
        hidden_size=hidden,
        intermediate_size=config.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", family.head_dim or max(1, hidden // heads)),
        vocab_size=config.integer("vocab_size"),
        max_position=config.context_limit(family.max_position),
        tied_embeddings=config.flag("tie_word_embeddings"),
        num_experts=experts,
        experts_per_token=config.integer("num_experts_per_tok", largest=experts) if experts else 0,
        moe_intermediate_size=config.integer("moe_intermediate_size") if experts else 0,
        sliding_window=_window(config),
        recurrent_heads=recurrent_heads,
        state_bytes_per_sequence=per_layer * len(recurrent_at),
        state_elements=state,
        conv_elements=conv,
        recurrent_at=tuple(sorted(recurrent_at)),
        recurrent_sizes=_recurrent_sizes(config) if recurrent_at else (0, 0, 0),
    )


def _experts(config: ModelConfig) -> int:
    """Return the number of routed experts; transformers 5 saves Qwen3-MoE's by another name."""
    is_renamed = config.get("num_experts") is None and config.get("num_local_experts") is not None
    key = "num_local_experts" if is_renamed else "num_experts"
    return config.integer(key, largest=EXPERTS_MAX)


def _window(config: ModelConfig) -> int | None:
    """Return the attention window; families with `use_sliding_window` need it to be true."""
    if config.get("use_sliding_window") is False or config.get("sliding_window") is None:
        return None
    return config.integer("sliding_window")


def _recurrent_layers(config: ModelConfig, family: Family) -> frozenset[int]:
    if not family.recurrent:
        return frozenset()
    layers, types = (
        config.integer("num_hidden_layers", largest=LAYERS_MAX),
        config.texts("layer_types"),
    )
    if not types:
        step = config.integer("full_attention_interval", 4)
        return frozenset(layer for layer in range(layers) if (layer + 1) % step)
    allowed = {"linear_attention", "full_attention"}
    if len(types) != layers or not set(types) <= allowed:
        where, fix = f"{config.path} layer_types", "repair the checkpoint's config.json"
        what = f"{layers} entries of {', '.join(sorted(allowed))}"
        value = f"{len(types)} entries of {', '.join(sorted(set(types)))}"
        raise refuse("E_CONFIG", where, what, value[:200], fix)
    return frozenset(layer for layer, kind in enumerate(types) if kind == "linear_attention")


def _moe_layers(config: ModelConfig, family: Family) -> frozenset[int]:
    if not family.experts:
        return frozenset()
    step, dense = config.integer("decoder_sparse_step", 1), set(config.integers("mlp_only_layers"))
    layers = range(config.integer("num_hidden_layers", largest=LAYERS_MAX))
    return frozenset(layer for layer in layers if (layer + 1) % step == 0 and layer not in dense)


def _state(config: ModelConfig) -> tuple[int, int, tuple[int, int]]:
    """Return numbers of state and of convolution state of one layer, and (key, value) heads."""
    key_heads, value_heads = (
        config.integer("linear_num_key_heads"),
        config.integer("linear_num_value_heads"),
    )
    if value_heads % key_heads:
        where, fix = f"{config.path} linear_num_key_heads", "repair the checkpoint's config.json"
        what = f"a divisor of linear_num_value_heads, {value_heads}"
        raise refuse("E_CONFIG", where, what, str(key_heads), fix)
    key_dim, value_dim = (
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
    )
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    window = config.integer("linear_conv_kernel_dim") - 1
    return value_heads * value_dim * key_dim, channels * window, (key_heads, value_heads)


def _recurrent_sizes(config: ModelConfig) -> tuple[int, int, int]:
    """Return the elements of a key and of a value head, and the width of the convolution."""
    key, value = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    return key, value, config.integer("linear_conv_kernel_dim")


def _layer(config: ModelConfig, family: Family, geometry: Geometry, kind: str) -> LayerOutline:
    mixer, feed_forward = kind.split("+")
    hidden = geometry.hidden_size
    linears: dict[str, Linear] = {}
    others = {f"{name}_layernorm.weight": Other((hidden,)) for name in ("input", "post_attention")}
    if mixer == "attention":
        _add_attention(config, family, geometry, linears, others)
    else:
        _add_recurrent(config, family, hidden, linears, others)
    if feed_forward == "mlp":
        width = config.integer("intermediate_size")
        _add_mlp(linears, "mlp", hidden, width)
        if config.flag("mlp_bias"):
            _add_mlp_bias(others, hidden, width)
        return LayerOutline(linears, others)
    linears["mlp.gate"] = Linear(geometry.num_experts, hidden, Cut.WHOLE)
    if family.experts == "shared":
        linears["mlp.shared_expert_gate"] = Linear(1, hidden, Cut.WHOLE)
        shared = config.integer("shared_expert_intermediate_size")
        _add_mlp(linears, "mlp.shared_expert", hidden, shared)
    experts = Experts("mlp.experts", geometry.num_experts, hidden, geometry.moe_intermediate_size)
    return LayerOutline(linears, others, experts)


def _add_attention(
    config: ModelConfig,
    family: Family,
    geometry: Geometry,
    linears: dict[str, Linear],
    others: dict[str, Other],
) -> None:
    hidden, width = geometry.hidden_size, geometry.head_dim
    query = geometry.num_heads * width
    gated = query * 2 if family.gated and config.flag("attn_output_gate", default=True) else query
    key = geometry.num_kv_heads * width
    linears["self_attn.q_proj"] = Linear(gated, hidden, Cut.ROWS, "self_attn.qkv_proj")
    linears["self_attn.k_proj"] = Linear(key, hidden, Cut.KV_HEADS, "self_attn.qkv_proj")
    linears["self_attn.v_proj"] = Linear(key, hidden, Cut.KV_HEADS, "self_attn.qkv_proj")
    linears["self_attn.o_proj"] = Linear(hidden, query, Cut.COLUMNS)
    if family.qkv_bias or config.flag("attention_bias"):
        others["self_attn.q_proj.bias"] = Other((gated,), Cut.ROWS)
        others["self_attn.k_proj.bias"] = Other((key,), Cut.KV_HEADS)
        others["self_attn.v_proj.bias"] = Other((key,), Cut.KV_HEADS)
    if not family.qkv_bias and config.flag("attention_bias"):
        others["self_attn.o_proj.bias"] = Other((hidden,))
    if family.qk_norm:
        others["self_attn.q_norm.weight"] = Other((width,), required=False)
        others["self_attn.k_norm.weight"] = Other((width,), required=False)


def _add_recurrent(
    config: ModelConfig,
    family: Family,
    hidden: int,
    linears: dict[str, Linear],
    others: dict[str, Other],
) -> None:
    key_heads = config.integer("linear_num_key_heads")
    value_heads = config.integer("linear_num_value_heads")
    value_dim = config.integer("linear_value_head_dim")
    key, value = key_heads * config.integer("linear_key_head_dim"), value_heads * value_dim
    if family.recurrent == "fused":
        parts = {"in_proj_qkvz": (2 * key + 2 * value, ""), "in_proj_ba": (2 * value_heads, "")}
    else:
        parts = {
            "in_proj_qkv": (2 * key + value, "in_proj_qkvz"),
            "in_proj_z": (value, "in_proj_qkvz"),
            "in_proj_b": (value_heads, "in_proj_ba"),
            "in_proj_a": (value_heads, "in_proj_ba"),
        }
    for name, (rows, site) in parts.items():
        fused = f"linear_attn.{site}" if site else ""
        linears[f"linear_attn.{name}"] = Linear(rows, hidden, Cut.ROWS, fused)
    linears["linear_attn.out_proj"] = Linear(hidden, value, Cut.COLUMNS)
    channels, kernel = 2 * key + value, config.integer("linear_conv_kernel_dim")
    others["linear_attn.conv1d.weight"] = Other((channels, 1, kernel), Cut.ROWS)
    others["linear_attn.A_log"] = Other((value_heads,), Cut.ROWS, keep_fp32=True)
    others["linear_attn.dt_bias"] = Other((value_heads,), Cut.ROWS)
    others["linear_attn.norm.weight"] = Other((value_dim,))


def _add_mlp(linears: dict[str, Linear], prefix: str, hidden: int, width: int) -> None:
    linears[f"{prefix}.gate_proj"] = Linear(width, hidden, Cut.ROWS, f"{prefix}.gate_up_proj")
    linears[f"{prefix}.up_proj"] = Linear(width, hidden, Cut.ROWS, f"{prefix}.gate_up_proj")
    linears[f"{prefix}.down_proj"] = Linear(hidden, width, Cut.COLUMNS)


def _add_mlp_bias(others: dict[str, Other], hidden: int, width: int) -> None:
    others["mlp.gate_proj.bias"] = Other((width,), Cut.ROWS)
    others["mlp.up_proj.bias"] = Other((width,), Cut.ROWS)
    others["mlp.down_proj.bias"] = Other((hidden,))
