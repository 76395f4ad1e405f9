"""What vLLM 0.27 has for hybrid models; the counterpart of `compat` for gated delta networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.config import get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot
from vllm.model_executor.layers import layernorm
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.rotary_embedding import mrope
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

if TYPE_CHECKING:
    import torch

    from appliance.vllm_plugin.compat import Layer

__all__ = [
    "ChunkGatedDeltaRule",
    "GemmaRMSNorm",
    "MRotaryEmbedding",
    "QwenGatedDeltaNetAttention",
    "conv_state",
    "offer_layer",
    "serves_text_only",
    "skips",
    "state_slots",
    "step_of",
]

# The engine's layers have no types that a checker could follow.
ChunkGatedDeltaRule: Any = qwen_gdn_linear_attn.ChunkGatedDeltaRule
QwenGatedDeltaNetAttention: Any = qwen_gdn_linear_attn.QwenGatedDeltaNetAttention
GemmaRMSNorm: Any = layernorm.GemmaRMSNorm
MRotaryEmbedding: Any = mrope.MRotaryEmbedding

_Class = TypeVar("_Class", bound=type)


def offer_layer(layer: _Class) -> _Class:
    """Let the engine make `layer` wherever it would make the class of its own that it extends.

    May be called any number of times.
    """
    replaced: Any = layer.__mro__[1]
    name = str(replaced.__name__)
    if name not in op_registry_oot:
        registry: Any = CustomOp if issubclass(layer, CustomOp) else PluggableLayer
        own_name = replaced.name
        registry.register_oot(layer, name=name)
        # The engine turns operations on and off by the name of its own class.
        cast("Any", layer).name = own_name
    return layer


def serves_text_only() -> bool:
    """Say if the engine that is being built takes no images."""
    config: Any = get_current_vllm_config_or_none()
    if config is None or config.model_config is None:
        return False
    multimodal = config.model_config.multimodal_config
    return multimodal is None or bool(multimodal.language_model_only)


def skips(site: str) -> bool:
    """Say if the engine only outlines a module and loads nothing of it: a tower for images."""
    return site.startswith("visual.") and serves_text_only()


def step_of(prefix: str) -> object | None:
    """Return the metadata of the running step for the layer of this name, None in a profile run."""
    metadata: Any = get_forward_context().attn_metadata
    return None if metadata is None else metadata[prefix]


def state_slots(step: Layer, spec: Layer, cache_mode: str) -> torch.Tensor:
    """Return where each sequence of a step keeps its state now, [sequences], by any stride."""
    table = mamba_get_block_table_tensor(step.block_table_tensor, step.seq_lens, spec, cache_mode)
    return table[:, 0]


def conv_state(state: torch.Tensor) -> torch.Tensor:
    """Return the engine's state of a convolution as [slots, channels, width - 1]."""
    return state if is_conv_state_dim_first() else state.transpose(-1, -2)
