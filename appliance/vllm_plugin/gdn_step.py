"""Describes a step of the engine to the gated delta networks of a hybrid model."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from appliance.vllm_plugin import compat, compat_hybrid
from appliance.vllm_plugin.gdn_ops import Batch

DECODE_TOKENS = 1
"""Tokens of a sequence that the kernels for decodes take."""


class DeltaMetadata(Batch, compat.AttentionMetadata):
    """One step, of a type that the engine knows."""


class DeltaMetadataBuilder(compat.AttentionMetadataBuilder[DeltaMetadata]):
    """Turns the engine's description of a step into the kernels' arguments.

    What kernels read lies at fixed addresses, so that a captured step may be replayed.
    """

    _cudagraph_support: ClassVar[Any] = compat.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self,
        kv_cache_spec: compat.Layer,
        layer_names: list[str],
        vllm_config: compat.Layer,
        device: torch.device,
    ) -> None:
        """Make room for as many sequences as a step may have."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(DECODE_TOKENS)
        self.cache_mode = str(vllm_config.cache_config.mamba_cache_mode)
        most = int(vllm_config.scheduler_config.max_num_seqs)
        self.slots = torch.zeros(most, dtype=torch.int32, device=device)
        self.carried = torch.zeros(most, dtype=torch.bool, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: compat.Layer,
        fast_build: bool = False,
    ) -> DeltaMetadata:
        """Describe one step; its decodes lead, since the engine sorts them to the front.

        A prompt of one token counts as a decode: that its sequence is new, `carried` says.
        """
        del common_prefix_len, fast_build
        step, count = common_attn_metadata, int(common_attn_metadata.num_reqs)
        found = compat_hybrid.state_slots(step, self.kv_cache_spec, self.cache_mode)
        slots, carried = self.slots[:count], self.carried[:count]
        slots.copy_(found[:count])
        torch.gt(step.compute_num_computed_tokens()[:count], 0, out=carried)
        return DeltaMetadata(
            decodes=compat.leading_decodes(step, DECODE_TOKENS),
            longest=int(step.max_query_len),
            query_start=step.query_start_loc,
            slots=slots,
            carried=carried,
        )


class DeltaBackend(compat.AttentionBackend):
    """What the engine asks of the layers' backend."""

    @staticmethod
    def get_name() -> str:
        """Return the name in the engine's log."""
        return "NVFP4_GDN"

    @staticmethod
    def get_impl_cls() -> Any:  # noqa: ANN401 - the layers compute themselves
        """Refuse: these layers have no implementation beside themselves.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[DeltaMetadataBuilder]:
        """Return the class that describes steps."""
        return DeltaMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """Return True: a fixed state for each sequence, no keys."""
        return True
