"""Which tensors of each architecture are quantized, which share a global scale, which stay dense.

A site is what the engine runs as one matrix: its parts must share one global scale, because engines
exist that keep one scale per fused matrix. A tensor that no line of the table covers is an error:
guessing would give a checkpoint that loads and answers nonsense.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Site:
    """The place of one quantized matrix.

    Attributes:
        name: Module name of the fused matrix, such as `model.layers.0.self_attn.qkv_proj`.
        parts: Module names of every part in fused order; the matrix itself is one of them.
    """

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Dense:
    """A group of tensors that keep their type.

    Attributes:
        pattern: Matches the whole tensor name.
        ignore: Entry of the `ignore` list that covers its linear modules, empty if it has none.
    """

    pattern: re.Pattern[str]
    ignore: str = ""


@dataclass(frozen=True)
class _Parent:
    """A module with sites: whole-name pattern, and fused name to leaf names."""

    pattern: re.Pattern[str]
    sites: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Architecture:
    """The table of one family."""

    parents: tuple[_Parent, ...]
    dense: tuple[Dense, ...]
    stack: re.Pattern[str] | None = None

    def is_stack(self, tensor: str) -> bool:
        """Whether a tensor holds one matrix of every expert: [E, 2I, H] gate and up, [E, H, I]."""
        return self.stack is not None and self.stack.fullmatch(tensor) is not None

    def site_of(self, tensor: str) -> Site | None:
        """Return the site of a `.weight` tensor, or None if it is none."""
        module, _, kind = tensor.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        if kind != "weight":
            return None
        for candidate in self.parents:
            if candidate.pattern.fullmatch(parent) is None:
                continue
            for fused, leaves in candidate.sites.items():
                if leaf in leaves:
                    return Site(f"{parent}.{fused}", tuple(f"{parent}.{name}" for name in leaves))
        return None

    def dense_group(self, tensor: str) -> Dense | None:
        """Return the dense group that covers a tensor, or None."""
        return next((group for group in self.dense if group.pattern.fullmatch(tensor)), None)


# `model.layers.0`, or `model.language_model.layers.0` inside a model of more than text.
_LAYER = r"(?:model\.|language_model\.){0,3}layers\.\d+"
_OUTER = r"(?:model\.|language_model\.){0,3}"

_ATTENTION = _Parent(
    re.compile(rf"{_LAYER}\.self_attn"),
    {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)},
)
_GATED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MLP = _Parent(re.compile(rf"{_LAYER}\.mlp"), _GATED)
# Every expert has two sites of its own: experts differ in range, and engines keep one scale each.
_EXPERTS = _Parent(re.compile(rf"{_LAYER}\.mlp\.(?:experts\.\d+|shared_expert)"), _GATED)
_DELTA_NET_SPLIT = _Parent(
    re.compile(rf"{_LAYER}\.linear_attn"),
    {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "out_proj": ("out_proj",)},
)
_DELTA_NET_FUSED = _Parent(
    re.compile(rf"{_LAYER}\.linear_attn"),
    {"in_proj_qkvz": ("in_proj_qkvz",), "out_proj": ("out_proj",)},
)


def _dense(pattern: str, ignore: str = "") -> Dense:
    return Dense(re.compile(pattern), ignore)


_PLAIN = (
    _dense(rf"{_OUTER}embed_tokens\.weight"),
    _dense(rf"{_OUTER}lm_head\.weight"),
    _dense(rf"{_OUTER}norm\.weight"),
    _dense(rf"{_LAYER}\.(?:input|post_attention)_layernorm\.weight"),
    _dense(rf"{_LAYER}\.self_attn\.[qk]_norm\.weight"),
    _dense(rf"{_LAYER}\.(?:self_attn|mlp)\.[a-z]+_proj\.bias"),
    _dense(rf"{_LAYER}\.self_attn\.rotary_emb\.inv_freq"),
)
_ROUTER = (
    _dense(rf"{_LAYER}\.mlp\.gate\.weight", r"re:.*\.mlp\.gate$"),
    _dense(rf"{_LAYER}\.mlp\.shared_expert_gate\.weight", r"re:.*\.shared_expert_gate$"),
)
# The gates decide how fast the state decays: 0.09 % of the weights, and errors in them add up over
# the whole sequence.
_DELTA_NET_DENSE = (
    _dense(
        rf"{_LAYER}\.linear_attn\.in_proj_(?:a|b|ba)\.weight",
        r"re:.*\.linear_attn\.in_proj_(a|b|ba)$",
    ),
    _dense(rf"{_LAYER}\.linear_attn\.(?:conv1d\.weight|conv1d\.bias|A_log|dt_bias|norm\.weight)"),
)
_MTP = _dense(r"(?:model\.)?mtp\..+", r"re:.*mtp.*")
_VISION = _dense(r"(?:model\.)?visual\..+", r"re:.*visual.*")

_STACK = re.compile(rf"{_LAYER}\.mlp\.experts\.(?:gate_up_proj|down_proj)")

_LLAMA = Architecture((_ATTENTION, _MLP), _PLAIN)
_MOE = Architecture((_ATTENTION, _MLP, _EXPERTS), (*_PLAIN, *_ROUTER), _STACK)
_NEXT = Architecture(
    (_ATTENTION, _MLP, _EXPERTS, _DELTA_NET_FUSED),
    (*_PLAIN, *_ROUTER, *_DELTA_NET_DENSE, _MTP),
    _STACK,
)
_HYBRID = Architecture(
    (_ATTENTION, _MLP, _DELTA_NET_SPLIT), (*_PLAIN, *_DELTA_NET_DENSE, _MTP, _VISION)
)
_HYBRID_MOE = Architecture(
    (_ATTENTION, _MLP, _EXPERTS, _DELTA_NET_SPLIT),
    (*_PLAIN, *_ROUTER, *_DELTA_NET_DENSE, _MTP, _VISION),
    _STACK,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": _MOE,
    "qwen3_next": _NEXT,
    "qwen3_5": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe": _HYBRID_MOE,
    "qwen3_5_moe_text": _HYBRID_MOE,
}
"""By `model_type` of config.json."""
