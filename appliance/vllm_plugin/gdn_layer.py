"""The gated delta network of hybrid models, on the kernel library.

The engine's own runs kernels of Triton on GPUs, and on CPUs one that takes BF16 alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.vllm_plugin import compat_hybrid, gdn_ops
from appliance.vllm_plugin.dense import DenseLinearMethod
from appliance.vllm_plugin.device import TYPES, room
from appliance.vllm_plugin.gdn_step import DeltaBackend, DeltaMetadata

if TYPE_CHECKING:
    from appliance.vllm_plugin import compat


class NoChunks(compat_hybrid.ChunkGatedDeltaRule):  # type: ignore[misc]
    """Stands where the engine's layer keeps its kernels for prompts, which are not used."""

    def __init__(self) -> None:
        """Choose no kernel, and say nothing of one."""
        nn.Module.__init__(self)
        self.gdn_prefill_backend = "triton"


class GatedDeltaNet(compat_hybrid.QwenGatedDeltaNetAttention):  # type: ignore[misc]
    """Projections, convolution, gated delta rule, gated norm, projection."""

    def __init__(self, config: compat.Layer, vllm_config: compat.Layer, **others: object) -> None:
        """Make the engine's own layer and choose what it runs on.

        Raises:
            ApplianceError: E_SPECULATIVE if tokens are to be guessed ahead.
        """
        engine: Any = super()
        engine.__init__(config, vllm_config=vllm_config, **others)
        if vllm_config.speculative_config is not None:
            what = "a recurrent state cannot be taken back, so no token may be guessed"
            fix = "serve the model without a speculative config"
            value = str(vllm_config.speculative_config.method)
            fault = Fault("E_SPECULATIVE", "speculative-config", what, value, fix)
            raise ApplianceError(ExitCode.CONFIG, fault)
        self.most_sequences = int(vllm_config.scheduler_config.max_num_seqs)
        self.has_kernels = vllm_config.model_config.dtype in TYPES
        self.runs_without_triton = (
            self.has_kernels
        )  # asked by the engine's warm-up, see its patches
        if self.has_kernels:
            self.conv1d.quant_method = DenseLinearMethod(f"{self.prefix}.conv1d")

    def get_attn_backend(self) -> Any:  # noqa: ANN401 - the engine's type
        """Return what describes the steps of this layer."""
        engine: Any = super()
        return DeltaBackend if self.has_kernels else engine.get_attn_backend()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer; both are [tokens, hidden].

        Raises:
            LibraryError: If the library refuses a call.
        """
        if not self.has_kernels:
            engine: Any = super()
            return cast("torch.Tensor", engine.forward(hidden_states))
        mixed, z, b, a = self._project(hidden_states)
        heads = self.num_v_heads // self.tp_size
        z = z.view(z.shape[0], heads, self.head_v_dim)
        computed = self._attend(mixed, b, a)
        gated = gdn_ops.gated_norm(
            computed, z, self.norm.weight, self.norm.eps, sigmoid=self.norm.activation == "sigmoid"
        )
        return cast("torch.Tensor", self.out_proj(gated.flatten(-2))[0])

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return q, k and v side by side, z, b and a, each [tokens, ...]."""
        qkvz, ba = self.in_proj_qkvz(x)[0], self.in_proj_ba(x)[0]
        if self.gqa_interleaved_layout:
            query, key, value, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
            mixed = torch.cat([part.flatten(1) for part in (query, key, value)], dim=-1)
            return mixed, z, b, a
        values = self.value_dim // self.tp_size
        mixed, z = qkvz.split([qkvz.shape[1] - values, values], dim=-1)
        return mixed, z, *self.split_ba(ba)

    def _attend(self, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """Return [tokens, value heads, value size]; the states of the step's sequences change."""
        heads, key_heads = self.num_v_heads // self.tp_size, self.num_k_heads // self.tp_size
        step = compat_hybrid.step_of(self.prefix)
        if not isinstance(step, DeltaMetadata):  # the engine measures memory
            self._reserve(mixed, key_heads)
            return mixed.new_zeros((mixed.shape[0], heads, self.head_v_dim))
        conv_state, state = self.kv_cache
        weight = self.conv1d.weight.view(-1, self.conv_kernel_size)
        convolved = gdn_ops.convolve(
            mixed,
            weight,
            compat_hybrid.conv_state(conv_state),
            step,
            silu=self.activation in {"silu", "swish"},
        )
        rates = (self.A_log, self.dt_bias)
        return gdn_ops.recur(convolved, (a, b), rates, state, step, key_heads=key_heads)

    def _reserve(self, mixed: torch.Tensor, key_heads: int) -> None:
        """Take the memory of the longest step for a moment, so that the engine counts it."""
        shape = next(reversed(tuple(self.get_state_shape())))
        state = torch.empty((1, *shape), dtype=torch.float32, device="meta")
        size = gdn_ops.workspace_bytes(
            mixed, state, key_heads=key_heads, sequences=self.most_sequences
        )
        room(size, mixed.device)
