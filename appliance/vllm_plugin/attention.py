"""vLLM's attention backend CUSTOM: paged attention of the kernel library.

The cache is vLLM's own, a head's value behind its key. Steps of any mix of decodes and chunks run;
a step of decodes alone may be captured into a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.vllm_plugin import compat, paged
from appliance.vllm_plugin.paged import Heads, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD_SIZES = (64, 128, 256)
BLOCK = 16
"""Tokens of a cache block are a multiple of this."""


class PagedMetadata(Step, compat.AttentionMetadata):
    """One step, of a type that the engine knows."""


class PagedMetadataBuilder(compat.AttentionMetadataBuilder[PagedMetadata]):
    """Turns the engine's description of a step into the kernels' arguments; nothing is copied."""

    _cudagraph_support: ClassVar[Any] = compat.AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: compat.Layer,
        layer_names: list[str],
        vllm_config: compat.Layer,
        device: torch.device,
    ) -> None:
        """Keep the longest sequence that this engine serves."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.max_model_len = int(vllm_config.model_config.max_model_len)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: compat.Layer,
        fast_build: bool = False,
    ) -> PagedMetadata:
        """Describe one step; its decodes lead, since the engine sorts them to the front."""
        del common_prefix_len, fast_build
        step, threshold = common_attn_metadata, self.reorder_batch_threshold or 1
        return PagedMetadata(
            tokens=int(step.num_actual_tokens),
            decodes=compat.leading_decodes(step, threshold),
            decode_length=threshold,
            max_length=int(step.max_seq_len),
            query_start=step.query_start_loc,
            lengths=step.seq_lens,
            block_table=step.block_table_tensor,
            slots=step.slot_mapping,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: compat.Layer) -> PagedMetadata:
        """Describe a step for every step that may be replayed: of any length that is served."""
        metadata = self.build(0, common_attn_metadata)
        metadata.max_length = self.max_model_len
        # Only the capture itself reads them: short sequences make it quick.
        metadata.lengths.fill_(1)
        return metadata


class PagedAttention(compat.AttentionImpl[PagedMetadata]):
    """Causal attention of one layer over the paged cache."""

    def __init__(  # noqa: PLR0917 - the engine's signature
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = compat.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: object,
    ) -> None:
        """Keep the sizes of a layer.

        Raises:
            ApplianceError: E_ATTENTION for what the kernels do not have.
        """
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.heads = Heads(num_heads, self.num_kv_heads, head_size, self.scale, sliding_window or 0)
        asked = {
            "ALiBi": alibi_slopes,
            "a soft cap": logits_soft_cap,
            "sinks": others.get("sinks"),
            attn_type: attn_type != compat.DECODER,
        }
        lacking = [name for name, value in asked.items() if value]
        if lacking:
            what = "the backend CUSTOM has causal attention of decoders"
            fix = "serve another model"
            fault = Fault("E_ATTENTION", "attention", what, ", ".join(lacking), fix)
            raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)

    def forward(  # noqa: PLR0917 - the engine's signature
        self,
        layer: compat.Layer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the result of each query [tokens, heads, size] to output; the keys are cached.

        Raises:
            LibraryError: If the library refuses the call.
        """
        del layer, key, value, output_scale, output_block_scale
        if attn_metadata is None:  # the engine measures memory
            return output.fill_(0)
        paged.attend(self.heads, query, kv_cache, attn_metadata, output)
        return output

    def do_kv_cache_update(
        self,
        layer: compat.Layer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the step's keys and values, [tokens, kv_heads, size], to their slots.

        Raises:
            LibraryError: If the library refuses the call.
        """
        del layer
        paged.write(self.heads, key, value, kv_cache, slot_mapping)


class PagedBackend(compat.AttentionBackend):
    """What the engine asks before it chooses a backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16"]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """Return the name of the registry's place for backends of others."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedAttention]:
        """Return the class of a layer."""
        return PagedAttention

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        """Return the class that describes steps."""
        return PagedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        """Return the sizes of a cache block that the kernels read."""
        return [compat.MultipleOf(BLOCK)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the sizes of a head that the kernels are compiled for."""
        return list(HEAD_SIZES)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True."""
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the shape of one layer's cache: a head's value lies behind its key."""
        del cache_dtype_str
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the order in memory: block, token, head; a block of all layers lies together."""
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)
