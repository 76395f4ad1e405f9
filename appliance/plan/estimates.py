"""Shares of a card's memory that no header tells: activations, context, graphs, buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.plan.launch_plan import Item
from appliance.plan.split import Split, padded_vocabulary
from appliance.units import KIB, MIB

if TYPE_CHECKING:
    from appliance.checkpoint.summary import Geometry

CONTEXT_BYTES = 512 * MIB
COMM_BYTES = 192 * MIB
GRAPH_BASE_BYTES = 64 * MIB
GRAPH_LAYER_BYTES = 256 * KIB
WORKSPACE_BYTES = 64 * MIB
CPU_PROCESS_BYTES = 1_500 * MIB
PENALTY_BYTES = 26
"""Of a step with a penalty, for each sequence and token of the vocabulary, as the tests measure it:
two counts of 64 bits, the rest is factors and masks."""

CHUNK_TOKENS = 64
"""Tokens of one chunk of the linear-attention prefill; it keeps one state a chunk."""

ESTIMATE = "estimate, not measured on a V100"


def activation_item(
    geometry: Geometry, split: Split, *, element_bytes: int, step_tokens: int, sequences: int
) -> Item:
    """Return the peak of activations in one engine step of full length."""
    width, size = split.tensor, element_bytes
    query, key = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    streams = 4 * step_tokens * geometry.hidden_size * size
    mlp = 3 * step_tokens * geometry.intermediate_size * size // width
    expert = 3 * geometry.moe_intermediate_size // width + geometry.hidden_size
    experts = step_tokens * geometry.experts_per_token * expert * size
    attention = step_tokens * (3 * query + 2 * key) * size // width
    recurrent = _recurrent_bytes(geometry, split, size, step_tokens)
    sampled = sequences * padded_vocabulary(geometry)
    # Layers and sampling follow each other, and one uses the memory of the other.
    widest = max(mlp, experts, attention, recurrent, PENALTY_BYTES * sampled)
    rotary = geometry.max_position * geometry.head_dim * size
    peak = streams + widest + 3 * sampled * 4 + rotary + WORKSPACE_BYTES
    formula = (
        f"{step_tokens} tokens x (4 hidden + widest of MLP, experts, attention, recurrence, "
        f"penalties), 3 x {sequences} x vocabulary FP32 logits, rotary table, 64 MiB of kernel "
        "workspace"
    )
    return Item("activations", peak, formula, f"shapes; {ESTIMATE}")


def _recurrent_bytes(geometry: Geometry, split: Split, size: int, step_tokens: int) -> int:
    if not geometry.recurrent_layers:
        return 0
    # q, k, v, z and their convolved copies are about as wide as twice the convolution channels.
    channels = geometry.conv_elements
    chunks = -(-step_tokens // CHUNK_TOKENS)
    states = chunks * geometry.state_elements * size
    return (2 * step_tokens * channels * size + states) // split.tensor


def capture_sizes(sequences: int) -> tuple[int, ...]:
    """Return the batch sizes whose decode step is captured as a CUDA graph."""
    sizes = {1, 2, 4, *range(8, sequences + 1, 8), sequences}
    return tuple(sorted(size for size in sizes if size <= sequences))


def graph_item(geometry: Geometry, sequences: int) -> Item:
    """Return the memory of captured CUDA graphs."""
    count = len(capture_sizes(sequences))
    total = GRAPH_BASE_BYTES + count * geometry.num_layers * GRAPH_LAYER_BYTES
    formula = f"64 MiB + {count} batch sizes x {geometry.num_layers} layers x 256 KiB"
    return Item("cuda_graphs", total, formula, ESTIMATE)


def context_item() -> Item:
    """Return the memory of the CUDA context with the code it loads."""
    formula = "CUDA context, loaded code, cuBLAS handles"
    return Item("cuda_context", CONTEXT_BYTES, formula, ESTIMATE)


def comm_item() -> Item:
    """Return the memory of NCCL's buffers and channels."""
    return Item("comm_buffers", COMM_BYTES, "NCCL channels of one communicator", ESTIMATE)


def process_item() -> Item:
    """Return the memory of the CPU engine's own processes."""
    formula = "API server, engine core and worker without weights and cache"
    return Item("process", CPU_PROCESS_BYTES, formula, "vLLM 0.27.1 on CPU, PSS measured")
