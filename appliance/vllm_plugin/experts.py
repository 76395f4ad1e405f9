"""Mixture-of-experts layers: what all kinds of weights share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.vllm_plugin import compat, ledger, ops

if TYPE_CHECKING:
    import torch

Loader = Callable[..., bool | None]

GATE, DOWN, UP = "w1", "w2", "w3"
"""The engine's names of an expert's three matrices."""

FUSED = {"w13": (GATE, UP), "w2": (DOWN,)}
"""The engine's parameters, and the matrices stacked in each."""


@dataclass(frozen=True)
class Site:
    """The experts of one layer as a checkpoint calls them.

    Attributes:
        name: Checkpoint name of the module that holds them.
        projections: `w1`, `w2`, `w3` to the checkpoint's names.
    """

    name: str
    projections: Mapping[str, str]

    def module(self, expert: int, part: str) -> str:
        """Return the checkpoint's name of one matrix, by the global index of its expert."""
        return f"{self.name}.{expert}.{self.projections[part]}"


@dataclass(frozen=True)
class Widths:
    """The sizes of one layer on this rank.

    Attributes:
        count: Experts on this rank.
        hidden: Width of the residual stream.
        full: Width of an expert, all ranks together.
        share: Width of an expert on this rank.
    """

    count: int
    hidden: int
    full: int
    share: int

    def stored(self, part: str) -> tuple[int, int]:
        """Return rows and columns of one matrix before ranks cut it."""
        return (self.hidden, self.full) if part == DOWN else (self.full, self.hidden)

    def held(self, prefix: str) -> tuple[int, int]:
        """Return rows and columns of one fused parameter of one expert on this rank."""
        return (self.hidden, self.share) if prefix == "w2" else (2 * self.share, self.hidden)


class MoEMethod(compat.FusedMoEMethodBase):
    """Routes where the engine cannot, and hands tokens to the experts."""

    def __init__(self, moe_config: compat.Layer, site: Site) -> None:
        """Keep the engine's description and the checkpoint's names."""
        super().__init__(moe_config)
        self.site = site
        self.routes_here = compat.device_type() == "cpu"

    @property
    def is_monolithic(self) -> bool:
        """True on the CPU: the layer routes by itself, since the engine's router has no kernel."""
        return self.routes_here

    def get_fused_moe_quant_config(self, layer: compat.Layer) -> None:
        """Return nothing: no modular kernel of the engine is used."""

    def widths(self, layer: compat.Layer, count: int, hidden: int, share: int) -> Widths:
        """Return the sizes of a layer.

        Raises:
            ApplianceError: E_UNSUPPORTED_ALGO for an activation other than silu(gate) * up.
        """
        if not compat.uses_silu_and_mul(layer):
            what, value = "experts must compute silu(gate) * up", str(layer.activation)
            ledger.refuse("E_UNSUPPORTED_ALGO", self.site.name, what, value, "serve another model")
        full = share * int(layer.moe_config.moe_parallel_config.tp_size)
        return Widths(count, hidden, full, share)

    def apply_monolithic(
        self,
        layer: compat.Layer,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Route each token and return the weighted sum of its experts; x is [tokens, hidden]."""
        del input_ids  # only models that route by token need it
        shares, ids = compat.route_tokens(layer, x, router_logits)
        return self.experts(layer, x, shares, ids)

    def apply(  # noqa: PLR0917 - the engine's signature
        self,
        layer: compat.Layer,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: compat.Layer = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of the experts that the engine's router chose."""
        del shared_experts, shared_experts_input  # the engine runs and adds them
        return self.experts(layer, x, topk_weights, topk_ids)

    @abstractmethod
    def experts(
        self, layer: compat.Layer, x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            layer: The layer.
            x: [tokens, hidden].
            shares: float32 [tokens, top_k].
            ids: int32 [tokens, top_k], global.
        """


def decoded_experts(
    layer: compat.Layer, x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Compute with the layer's weights in the compute type; arguments as `MoEMethod.experts`."""
    if layer.expert_map is not None:
        ids = layer.expert_map[ids.long()]
    return ops.experts(
        x,
        layer.w13_weight,
        layer.w2_weight,
        weights=shares,
        ids=ids,
        weight_input=bool(layer.apply_router_weight_on_input),
    )
