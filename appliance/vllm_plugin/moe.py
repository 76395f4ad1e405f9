"""Mixture-of-experts layers with NVFP4 weights: parameters, checks, and the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from appliance.nvfp4 import abi
from appliance.vllm_plugin import compat, kernel_ops, ledger, resident, weights
from appliance.vllm_plugin.canonical import Packed
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
from appliance.vllm_plugin.route import WeightRoute
from appliance.vllm_plugin.stacks import Stacks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.vllm_plugin.inventory import Names
    from appliance.vllm_plugin.tally import Tally

Enter = Callable[[ledger.MatrixRecord, ledger.Matrix, "Names", torch.Tensor], None]


@dataclass(frozen=True)
class Loading:
    """One layer of this rank while it loads.

    Attributes:
        widths: Its sizes.
        dtype: Type that the weights are decoded to.
        records: What was loaded of each matrix, by the expert's index on this rank and part.
    """

    widths: Widths
    dtype: torch.dtype
    records: dict[tuple[int, str], ledger.MatrixRecord] = field(default_factory=dict)

    def record(self, expert: int, part: str) -> ledger.MatrixRecord:
        """Return the record of one matrix of one expert of this rank."""
        return self.records.setdefault((expert, part), ledger.MatrixRecord())

    def matrix(self, name: str, part: str) -> ledger.Matrix:
        """Return what the checkpoint must hold of one matrix."""
        return ledger.Matrix(name, *self.widths.stored(part))


class Nvfp4MoEMethod(MoEMethod):
    """Loads NVFP4 experts and computes with them; gate and up keep their own globals."""

    def __init__(
        self,
        moe_config: compat.Layer,
        site: Site,
        names: Names,
        tally: Tally,
        *,
        route: WeightRoute = WeightRoute.DEQUANTIZED,
        stacks: Stacks = Stacks(),  # noqa: B008 - frozen
    ) -> None:
        """Keep the engine's description, the checkpoint's names, and where to report bytes.

        With the route FUSED the weights stay packed. `stacks` has the shapes of the stacks where
        all experts lie in one tensor.
        """
        super().__init__(moe_config, site)
        self.names = names
        self.stacks = stacks
        self.tally = tally
        self.route = route
        self.loading: Loading | None = None
        self.held: dict[str, resident.Resident] = {}

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
            ApplianceError: E_TP_GROUP if the ranks would cut a block, E_UNSUPPORTED_ALGO for an
                activation other than silu(gate) * up.
        """
        widths = self.widths(layer, num_experts, hidden_size, intermediate_size_per_partition)
        for columns in (widths.hidden, widths.share):
            group = self.names.group
            if columns % group:
                what = f"an expert's columns on a rank must be whole blocks of {group}"
                fix = "use fewer ranks, or pipeline parallelism"
                ledger.refuse("E_TP_GROUP", self.site.name, what, str(columns), fix)
        self.loading = Loading(widths, params_dtype)
        for prefix in FUSED:
            self._register(layer, self.loading, prefix, extra["weight_loader"])
        if self.stacks.shapes:
            self._split_stacks(layer, widths)

    def _split_stacks(self, layer: compat.Layer, widths: Widths) -> None:
        """Let the engine see single experts where the checkpoint has stacks."""
        load, stacks = layer.load_weights, self.stacks
        names = {
            word: self.site.projections[part]
            for word, part in (("gate", GATE), ("up", UP), ("down", DOWN))
        }

        def load_weights(loaded: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
            single = stacks.split(loaded, hidden=widths.hidden, width=widths.full, names=names)
            found: Iterable[str] = load(single)
            return found

        layer.load_weights = load_weights

    def _register(self, layer: compat.Layer, loading: Loading, prefix: str, loader: Loader) -> None:
        names, (rows, columns) = self.names, loading.widths.held(prefix)
        count, wide = loading.widths.count, names.has_words
        kind = torch.int32 if wide else torch.uint8
        codes = torch.zeros(count, rows, columns // (8 if wide else 2), dtype=kind)
        blocks = columns // names.group
        scales = ledger.unwritten_scales(count, rows, blocks, scale_dtype=names.scale_dtype)
        entered = {
            names.codes: (codes, self._entering(layer, loading, ledger.enter_codes, loader)),
            names.scales: (scales, self._entering(layer, loading, ledger.enter_scales, loader)),
            names.globals: (
                torch.empty(0),
                self._entering(layer, loading, ledger.enter_global, None),
            ),
        }
        for suffix, (data, entering) in entered.items():
            # The engine's loader asks how scales are laid out; ours lie along a group of columns.
            made = weights.parameter(data, weight_loader=entering, quant_method="group")
            layer.register_parameter(f"{prefix}_{suffix}", made)
        for suffix in names.activations:
            unread = weights.parameter(torch.empty(0), weight_loader=weights.dropped)
            layer.register_parameter(f"{prefix}_{suffix}", unread)

    def _entering(
        self, layer: compat.Layer, loading: Loading, enter: Enter, loader: Loader | None
    ) -> Loader:
        """Enter each whole tensor of an expert of this rank; `loader` then cuts and copies it."""
        site, names = self.site, self.names

        def load(  # noqa: PLR0917 - the engine's signature
            param: torch.nn.Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            local = compat.local_expert(layer, expert_id)
            if local < 0:
                return False if return_success else None
            matrix = loading.matrix(site.module(expert_id, shard_id), shard_id)
            enter(loading.record(local, shard_id), matrix, names, loaded_weight)
            if loader is None:
                return True if return_success else None
            return loader(
                param,
                loaded_weight,
                weight_name,
                shard_id=shard_id,
                expert_id=expert_id,
                return_success=return_success,
            )

        return compat.mark_moe_loader(load)

    def process_weights_after_loading(self, layer: compat.Layer) -> None:
        """Check that every expert is whole, repack or decode all once, and free what was loaded.

        Raises:
            ApplianceError: If a tensor is missing or carries values that no kernel may see, or if
                the decoded weights differ from the oracle's.
        """
        loading = self.loading
        if loading is None:
            return
        self.loading = None
        loaded = self.names.loaded
        stored_bytes = held_bytes = 0
        for prefix in FUSED:
            packed = self._packed(layer, loading, prefix)
            suffix, weight = self._hold(packed, loading, prefix)
            weights.drop_parameters(layer, [f"{prefix}_{suffix}" for suffix in loaded])
            weights.set_plain(layer, f"{prefix}_{suffix}", weight)
            stored_bytes += packed.stored_bytes
            held_bytes += weight.nbytes
        self.tally.add(stored_bytes, held_bytes)

    def _hold(self, packed: Packed, loading: Loading, prefix: str) -> tuple[str, torch.Tensor]:
        """Return what the products read from now on, and the end of its name."""
        if self.route is WeightRoute.FUSED:
            kind = abi.WeightKind.LINEAR if prefix == "w2" else abi.WeightKind.GATE_UP
            self.held[prefix] = resident.pack(packed, kind, loading.widths.count)
            return "packed_weight", self.held[prefix].buffer
        weight = weights.dequantize_checked(packed, loading.dtype)
        return "weight", weight.view(loading.widths.count, -1, weight.shape[1])

    def _packed(self, layer: compat.Layer, loading: Loading, prefix: str) -> Packed:
        names, stacked, count = self.names, FUSED[prefix], loading.widths.count
        codes: torch.Tensor = getattr(layer, f"{prefix}_{names.codes}").data.view(torch.uint8)
        scales: torch.Tensor = getattr(layer, f"{prefix}_{names.scales}").data
        rows = scales.shape[1] // len(stacked)
        by_part = scales.view(count, len(stacked), rows, -1)
        shape = (count, len(stacked), rows)
        row_globals = torch.ones(*shape, dtype=torch.float32, device="cpu")
        parts: list[tuple[str, int]] = []
        for expert in range(loading.widths.count):
            globals_ = (loading.record(expert, part).globals for part in stacked)
            self.tally.note_globals(value for values in globals_ for value in values)
            for index, part in enumerate(stacked):
                name = self.site.module(compat.global_expert(layer, expert), part)
                record = loading.record(expert, part)
                if ledger.check(record, loading.matrix(name, part), names):
                    self.tally.note_zero(name)
                    ledger.clear(by_part[expert, index])
                elif names.has_global:
                    row_globals[expert, index] = record.globals[0]
                parts.append((name, rows))
        ledger.check_no_sentinel(scales, self.site.name, names)
        return Packed(
            codes.flatten(0, 1),
            scales.flatten(0, 1),
            row_globals.flatten().to(codes.device),
            names.divisor,
            tuple(parts),
        )

    def experts(
        self, layer: compat.Layer, x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, from packed or decoded weights."""
        if not self.held:
            return decoded_experts(layer, x, shares, ids)
        if bool(layer.apply_router_weight_on_input):  # with one expert a token only
            x, shares = x * shares.to(x.dtype), torch.ones_like(shares)
        chosen = {"weights": shares, "ids": ids, "expert_map": layer.expert_map}
        return kernel_ops.experts(x, self.held["w13"], self.held["w2"], **chosen)
