"""Everything that differs between vLLM versions; no other module asks for the version.

Made for vLLM 0.27. A second engine would add its own names here, and nothing elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.cpu_fused_moe import (
    select_experts,  # pyright: ignore[reportUnknownVariableType]
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    WEIGHT_LOADER_V2_SUPPORTED,
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import (
    _LOAD_FORMAT_TO_MODEL_LOADER,  # pyright: ignore[reportPrivateUsage] - registering warns
)
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.utils import (
    split_decodes_and_prefills,  # pyright: ignore[reportUnknownVariableType]
)

from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

__all__ = [
    "DECODER",
    "USUAL_PARTS",
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "ChannelQuantScaleParameter",
    "DefaultModelLoader",
    "FusedMoEMethodBase",
    "GroupQuantScaleParameter",
    "Layer",
    "LinearBase",
    "LinearMethodBase",
    "ModelWeightParameter",
    "MultipleOf",
    "NameMapper",
    "ParallelLMHead",
    "QuantizationConfig",
    "QuantizeMethodBase",
    "RoutedExperts",
    "UnquantizedEmbeddingMethod",
    "UnquantizedLinearMethod",
    "VocabParallelEmbedding",
    "additional_config",
    "check_version",
    "device_type",
    "full_part_rows",
    "global_expert",
    "leading_decodes",
    "local_expert",
    "mark_moe_loader",
    "offer_attention",
    "offer_loader",
    "offer_method",
    "route_tokens",
    "uses_silu_and_mul",
]

SUPPORTED_SERIES = "0.27"

USUAL_PARTS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused modules whose parts a model class may name too late: 0.27's Qwen3-MoE adds `gate_up_proj`
only after its mapping was handed to the quantization method."""

DECODER = AttentionType.DECODER.value
"""Attention of a decoder to what came before, the only kind that the plugin has."""

Layer: TypeAlias = Any
"""A module of the engine: its attributes are the engine's, and no type says which."""


class NameMapper(Protocol):
    """Turns tensor names of the checkpoint into names of the engine."""

    def apply_list(self, values: list[str]) -> list[str]:
        """Map each name; names that the engine drops are left out."""
        ...


def check_version() -> None:
    """Refuse a vLLM whose layers this plugin was never run with.

    Raises:
        ApplianceError: If the running vLLM is of another series.
    """
    version = vllm.__version__.split("+")[0]
    if version.split(".")[:2] != SUPPORTED_SERIES.split("."):
        fault = Fault(
            "ENGINE_VERSION",
            "vllm",
            f"the nvfp4 plugin needs the series {SUPPORTED_SERIES}",
            vllm.__version__,
            "use the engine that the appliance's lock files name",
        )
        raise ApplianceError(ExitCode.ENGINE_START, fault)


def offer_method(
    name: str, config: type[QuantizationConfig], linear_methods: Iterable[type]
) -> None:
    """Register the quantization method and its linear methods once.

    The loader that slices fused parts is chosen by the class name of the linear method, so the
    names are added to vLLM's list.
    """
    if name not in QUANTIZATION_METHODS:
        register_quantization_config(name)(config)
    for method in linear_methods:
        if method.__name__ not in WEIGHT_LOADER_V2_SUPPORTED:
            WEIGHT_LOADER_V2_SUPPORTED.append(method.__name__)


def offer_attention(backend: str) -> None:
    """Register the class at this path as the attention backend CUSTOM."""
    register_backend(AttentionBackendEnum.CUSTOM, backend)


def offer_loader(loader: type[DefaultModelLoader]) -> None:
    """Let the engine load safetensors with this class, wherever it would with its own."""
    for name in ("auto", "hf", "safetensors"):
        _LOAD_FORMAT_TO_MODEL_LOADER[name] = loader


def leading_decodes(step: Layer, threshold: int) -> int:
    """Return how many leading sequences of a step have at most `threshold` queries each."""
    decodes, _, _, _ = split_decodes_and_prefills(step, decode_threshold=threshold)
    return int(decodes)


def device_type() -> str:
    """Return `cpu` or `cuda`, the kind of device this process computes on."""
    return str(current_platform.device_type)


def speculative_method() -> str:
    """Return how this engine guesses tokens ahead, empty if it does not or outside of one."""
    config: Any = get_current_vllm_config_or_none()
    found: Any = None if config is None else config.speculative_config
    return "" if found is None else str(found.method)


def additional_config() -> Mapping[str, Any]:
    """Return what `--additional-config` gave this engine, empty outside of one."""
    config: Any = get_current_vllm_config_or_none()
    found: object = None if config is None else config.additional_config
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def full_part_rows(layer: Layer, output_size: int) -> list[int]:
    """Return the rows of each part of a linear layer as stored, all ranks together.

    vLLM's own `output_sizes` of a q/k/v layer counts a KV head once for each rank that repeats it.
    """
    if isinstance(layer, ParallelLMHead):
        return [int(layer.org_vocab_size)]
    if hasattr(layer, "total_num_kv_heads"):
        queries, keys = int(layer.total_num_heads), int(layer.total_num_kv_heads)
        head, value_head = int(layer.head_size), int(layer.v_head_size)
        return [queries * head, keys * head, keys * value_head]
    sizes = cast("list[int] | None", getattr(layer, "output_sizes", None))
    return [int(size) for size in sizes] if sizes else [output_size]


def local_expert(layer: Layer, expert: int) -> int:
    """Return the index of a global expert on this rank, -1 if another rank holds it."""
    expert_map = layer.expert_map
    return expert if expert_map is None else int(expert_map[expert])


def global_expert(layer: Layer, expert: int) -> int:
    """Return the global index of an expert of this rank."""
    expert_map = layer.expert_map
    return expert if expert_map is None else int((expert_map == expert).nonzero()[0])


def mark_moe_loader(loader: Callable[..., bool | None]) -> Callable[..., bool | None]:
    """Mark a loader as one that takes expert and part, as some model classes ask."""
    loader.supports_moe_loading = True  # type: ignore[attr-defined]
    return loader


def uses_silu_and_mul(layer: Layer) -> bool:
    """Say if an expert computes silu(gate) * up, the only one the plugin has."""
    return bool(layer.activation == MoEActivation.SILU)


def route_tokens(
    layer: Layer, x: torch.Tensor, router_logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts in torch: the engine's router calls an operation that its CPU build lacks.

    Returns:
        Weights, float32 [tokens, top_k], and global expert ids, int32 [tokens, top_k].
    """
    select = cast("Callable[..., tuple[torch.Tensor, torch.Tensor]]", select_experts)
    return select(
        hidden_states=x,
        router_logits=router_logits,
        top_k=layer.top_k,
        use_grouped_topk=layer.use_grouped_topk,
        renormalize=layer.renormalize,
        topk_group=layer.topk_group,
        num_expert_group=layer.num_expert_group,
        custom_routing_function=layer.custom_routing_function,
        scoring_func=layer.scoring_func,
        routed_scaling_factor=layer.routed_scaling_factor,
        e_score_correction_bias=layer.e_score_correction_bias,
    )
