"""Mixture-of-experts layers that are held in the compute type: stored so, or decoded from FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from appliance.checkpoint.stacks import lies_turned, stack_sizes
from appliance.checkpoint.stored import STACKED, split_name
from appliance.vllm_plugin import compat, weights
from appliance.vllm_plugin.arrivals import WEIGHT, Arrivals, StoredMatrix
from appliance.vllm_plugin.experts import (
    DOWN,
    FUSED,
    GATE,
    UP,
    Loader,
    MoEMethod,
    Site,
    Widths,
    decoded_experts,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from appliance.vllm_plugin.tally import Tally

_PARTS = (GATE, UP, DOWN)
_PREFIX = {GATE: "w13", UP: "w13", DOWN: "w2"}
_STACK_PARTS = {STACKED[0]: (GATE, UP), STACKED[1]: (DOWN,)}


class PlainMoEMethod(MoEMethod):
    """Loads experts of 16, 32 or 8 bits and computes with torch, expert by expert.

    vLLM's own product of such experts is a Triton kernel or needs its CUDA extension.
    """

    def __init__(
        self,
        moe_config: compat.Layer,
        site: Site,
        tally: Tally,
        scale_name: str | None,
        *,
        stacks: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Keep the checkpoint's names; without a name of scales its experts are not FP8.

        `stacks` has the shapes of the stacks where all experts lie in one tensor.
        """
        super().__init__(moe_config, site)
        self.tally = tally
        self.scale_name = scale_name
        self.stacks = stacks or {}
        self.arrivals = Arrivals(scale_name)
        self.loading: Widths | None = None

    def create_weights(
        self,
        layer: compat.Layer,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,  # noqa: ANN401 - the engine's signature
    ) -> None:
        """Register the parameters that the checkpoint's tensors are loaded into.

        Raises:
            ApplianceError: E_UNSUPPORTED_ALGO for an activation other than silu(gate) * up.
        """
        self.loading = self.widths(layer, num_experts, hidden_size, intermediate_size_per_partition)
        loader: Loader = extra["weight_loader"]
        for prefix in FUSED:
            shape = (num_experts, *self.loading.held(prefix))
            entering = {WEIGHT: (torch.empty(shape, dtype=params_dtype), WEIGHT)}
            if self.scale_name is not None:
                entering[self.scale_name] = (torch.empty(0), self.scale_name)
                unread = weights.parameter(torch.empty(0), weight_loader=weights.dropped)
                layer.register_parameter(f"{prefix}_input_scale", unread)
            for name, (data, suffix) in entering.items():
                load = self._entering(layer, suffix, loader)
                made = weights.parameter(data, weight_loader=load)
                layer.register_parameter(f"{prefix}_{name}", made)
        self._take_stacks(layer, self.loading, loader)

    def _entering(self, layer: compat.Layer, suffix: str, loader: Loader) -> Loader:
        """Return a loader that hands one expert's matrix on when all of it is there."""

        def load(  # noqa: PLR0917 - the engine's signature
            param: torch.nn.Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            del param, weight_name
            is_ours = self._take(layer, suffix, loader, loaded_weight, expert_id, (shard_id,))
            return is_ours if return_success else None

        return compat.mark_moe_loader(load)

    def _take(  # noqa: PLR0917 - of this class only
        self,
        layer: compat.Layer,
        suffix: str,
        loader: Loader,
        loaded: torch.Tensor,
        expert: int,
        parts: tuple[str, ...],
    ) -> bool:
        """Enter a tensor of one expert; hand its parts on when the matrix is whole."""
        local = compat.local_expert(layer, expert)
        if local < 0:
            return False
        name = self.site.module(expert, parts[0])
        keys = tuple(_key(local, part) for part in parts)
        matrix = self.arrivals.enter(keys, suffix, name, loaded)
        if matrix is not None:
            self._hand_on(layer, loader, matrix, expert, parts)
        return True

    def _hand_on(
        self,
        layer: compat.Layer,
        loader: Loader,
        matrix: StoredMatrix,
        expert: int,
        parts: tuple[str, ...],
    ) -> None:
        widths = self.loading
        if widths is None:
            return
        rows, columns = widths.stored(parts[0])
        matrix.check_shape(rows * len(parts), columns)
        name = f"{_PREFIX[parts[0]]}_{WEIGHT}"
        held: torch.nn.Parameter = getattr(layer, name)
        decoded = matrix.decode(held.dtype, held.device)
        for part, share in zip(parts, decoded.chunk(len(parts)), strict=True):
            loader(held, share, name, shard_id=part, expert_id=expert, return_success=True)

    def _take_stacks(self, layer: compat.Layer, widths: Widths, loader: Loader) -> None:
        """Take tensors that hold all experts from the engine's loader, which cuts them otherwise.

        A scale of a stack may be for gate and up together, so a matrix of both is decoded whole.
        """
        load = layer.load_weights

        def load_weights(loaded: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
            taken: list[str] = []

            def others() -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in loaded:
                    leaf, suffix = split_name(name)
                    if leaf not in _STACK_PARTS:
                        yield name, tensor
                    elif suffix in (WEIGHT, self.scale_name):
                        parts = _STACK_PARTS[leaf]
                        turned = suffix == WEIGHT and self._is_turned(leaf, widths)
                        upright = tensor.transpose(1, 2) if turned else tensor
                        for expert, one in enumerate(upright):
                            self._take(layer, suffix, loader, one, expert, parts)
                        taken.append(f"{_PREFIX[parts[0]]}_{suffix}")

            yield from load(others())
            yield from taken

        layer.load_weights = load_weights

    def _is_turned(self, leaf: str, widths: Widths) -> bool:
        """Tell whether a stack has input before output features, as in older exports."""
        return lies_turned(leaf, self.stacks, stack_sizes(widths.hidden, widths.full))

    def process_weights_after_loading(self, layer: compat.Layer) -> None:
        """Check that every expert came, and leave plain parameters.

        Raises:
            ApplianceError: If a tensor is missing.
        """
        widths = self.loading
        if widths is None:
            return
        self.loading = None
        for local in range(widths.count):
            expert = compat.global_expert(layer, local)
            for part in _PARTS:
                self.arrivals.check_part(_key(local, part), self.site.module(expert, part))
        numbers = 0
        for prefix in FUSED:
            name = f"{prefix}_{WEIGHT}"
            held: torch.Tensor = getattr(layer, name).data
            weights.drop_parameters(layer, [name])
            if self.scale_name is not None:
                unread = [f"{prefix}_{self.scale_name}", f"{prefix}_input_scale"]
                weights.drop_parameters(layer, unread)
            weights.set_plain(layer, name, held)
            numbers += held.numel()
        if self.scale_name is not None:
            itemsize = layer.w2_weight.itemsize
            self.tally.add(numbers + self.arrivals.scale_bytes, numbers * itemsize)

    def experts(
        self, layer: compat.Layer, x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts."""
        return decoded_experts(layer, x, shares, ids)


def _key(local: int, part: str) -> int:
    return local * len(_PARTS) + _PARTS.index(part)
