"""What the plan needs to know of a checkpoint; made from headers and config alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TensorName = str


class Kind(StrEnum):
    """What a tensor's bytes are for."""

    CODES = "codes"  # packed E2M1, two a byte
    BLOCK_SCALES = "block_scales"  # E4M3, one per 16 weights
    GLOBALS = "globals"  # FP32 global scales
    ACTIVATION_SCALES = "activation_scales"  # read by no Volta path
    FP8 = "fp8"  # E4M3 weights of FP8 parts, their scales included
    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    DENSE = "dense"  # other 16- or 32-bit weights, norms and biases included
    MTP = "mtp"  # multi-token-prediction layers; skipped without speculation
    VISION = "vision"
    OTHER = "other"


class Cut(StrEnum):
    """How tensor parallelism cuts a tensor; `WHOLE` means every rank holds all of it."""

    WHOLE = "whole"
    ROWS = "rows"  # output features: column-parallel linears, vocabulary
    COLUMNS = "columns"  # input features: row-parallel linears
    KV_HEADS = "kv_heads"  # rows, replicated when there are more ranks than KV heads


@dataclass(frozen=True)
class TensorGroup:
    """All tensors of one kind, place and cut, summed: what a plan can split over ranks.

    Attributes:
        kind: What the bytes are for.
        layer: Index of the transformer layer, or None outside the layers.
        cut: How tensor parallelism cuts them.
        bytes_stored: Bytes in the files.
        elements: Logical weights (twice the bytes for packed codes).
        rows: Summed output features of these tensors; a dequantizer needs one FP32 global per row.
        fp32_elements: Part of the elements that stays FP32 whatever the compute type is.
    """

    kind: Kind
    layer: int | None
    cut: Cut
    bytes_stored: int
    elements: int
    rows: int = 0
    fp32_elements: int = 0


@dataclass(frozen=True)
class Geometry:
    """The shape of the model as far as memory and divisibility go.

    Attributes:
        architecture: First entry of `architectures`.
        model_type: `model_type` of the (text) config.
        num_layers: Transformer layers that are served (MTP layers not counted).
        attention_layers: Layers that keep a KV cache of full length.
        recurrent_layers: Layers that keep a fixed state per sequence.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the dense MLP, 0 if every layer is MoE.
        num_heads: Query heads of an attention layer.
        num_kv_heads: KV heads of an attention layer.
        head_dim: Width of one head.
        vocab_size: Rows of the embedding.
        max_position: The model's own context limit in tokens.
        tied_embeddings: lm_head shares the embedding.
        num_experts: Routed experts a layer, 0 for a dense model.
        experts_per_token: Routed experts a token uses.
        moe_intermediate_size: Width of one expert.
        sliding_window: Window in tokens, None for full attention.
        recurrent_heads: (key heads, value heads) of a recurrent layer, (0, 0) without.
        state_bytes_per_sequence: Recurrent state (FP32) and convolution state (FP16) of one
            sequence over all layers, bytes.
        state_elements: Recurrent state of one sequence in one recurrent layer, in numbers.
        conv_elements: Convolution state of one sequence in one recurrent layer, in numbers.
        recurrent_at: Indexes of the recurrent layers.
        recurrent_sizes: (elements of a key head, of a value head, width of the convolution) of a
            recurrent layer, (0, 0, 0) without.
    """

    architecture: str
    model_type: str
    num_layers: int
    attention_layers: int
    recurrent_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    tied_embeddings: bool
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    sliding_window: int | None = None
    recurrent_heads: tuple[int, int] = (0, 0)
    state_bytes_per_sequence: int = 0
    state_elements: int = 0
    conv_elements: int = 0
    recurrent_at: tuple[int, ...] = ()
    recurrent_sizes: tuple[int, int, int] = (0, 0, 0)

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes of KV cache one token takes over all layers and KV heads of one unsplit model."""
        return 2 * self.attention_layers * self.num_kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True)
class CheckpointSummary:
    """One checkpoint, without reading a weight.

    Attributes:
        path: Directory.
        format: `nvfp4`, `fp8`, `mixed` or `dense`.
        producer: `modelopt`, `compressed-tensors`, `fp8`, `quasar-st` or `none`.
        group_size: Weights per block scale, 0 for dense.
        geometry: Shape of the model.
        groups: Every tensor, summed by kind, layer and cut.
        files: Shard name to bytes.
        tensor_count: Tensors over all shards.
        largest_shard_bytes: Bytes of the largest file.
        input_widths: K of each row-parallel quantized linear, for the divisibility check.
        has_tokenizer: tokenizer.json or tokenizer.model is there.
        has_chat_template: A chat template is there.
        notes: `W_` and `I_` codes with their sentence.
        digest: SHA-256 over the configuration files and every shard's header and size, in hex.
    """

    path: Path
    format: str
    producer: str
    group_size: int
    geometry: Geometry
    groups: tuple[TensorGroup, ...]
    files: Mapping[str, int]
    tensor_count: int
    largest_shard_bytes: int
    input_widths: tuple[tuple[TensorName, int], ...] = ()
    has_tokenizer: bool = True
    has_chat_template: bool = True
    notes: tuple[str, ...] = field(default=())
    digest: str = ""

    def bytes_by_kind(self) -> dict[Kind, int]:
        """Bytes in the files by what they are for."""
        total: dict[Kind, int] = {}
        for group in self.groups:
            total[group.kind] = total.get(group.kind, 0) + group.bytes_stored
        return total
