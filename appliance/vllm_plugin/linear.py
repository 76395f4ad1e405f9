"""Linear layers with NVFP4 weights: parameters to load into, checks, and the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from appliance.checkpoint.metadata import NVFP4_GROUP
from appliance.nvfp4 import abi
from appliance.vllm_plugin import compat, kernel_ops, ledger, resident, weights
from appliance.vllm_plugin.canonical import Packed
from appliance.vllm_plugin.route import WeightRoute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.vllm_plugin.inventory import Names
    from appliance.vllm_plugin.tally import Tally

ShardId = str | int | tuple[int, ...] | None
Loader = Callable[..., None]

_QKV_PARTS = {"q": 0, "k": 1, "v": 2}


@dataclass(frozen=True)
class Site:
    """One linear layer of this rank while it loads.

    Attributes:
        matrices: One per part, as the checkpoint stores it before the ranks cut it.
        records: What was loaded of each part.
        part_rows: Rows of each part on this rank.
        columns: Input features of the layer on this rank.
        dtype: Type that the weights are decoded to.
    """

    matrices: tuple[ledger.Matrix, ...]
    records: tuple[ledger.MatrixRecord, ...]
    part_rows: tuple[int, ...]
    columns: int
    dtype: torch.dtype


def parts_of(shard: ShardId, count: int) -> tuple[int, ...]:
    """Return the indices of the parts that a loaded tensor holds.

    Args:
        shard: What the engine says of it: `q`, `k`, `v`, an index, several, or None for all.
        count: Parts of the layer.
    """
    if shard is None:
        return tuple(range(count))
    if isinstance(shard, str):
        return (_QKV_PARTS[shard],)
    return (shard,) if isinstance(shard, int) else shard


def stored_matrices(
    site: str, leaves: Sequence[str], part_rows: Sequence[int], columns: int
) -> tuple[ledger.Matrix, ...]:
    """Name the matrix that each part of a fused layer belongs to.

    Parts that the checkpoint stores as separate tensors have their own names; otherwise every part
    has the name of the layer.
    """
    names = list(leaves) if len(leaves) == len(part_rows) else [site] * len(part_rows)
    return tuple(
        ledger.Matrix(name, rows, columns) for name, rows in zip(names, part_rows, strict=True)
    )


class Nvfp4LinearMethod(compat.LinearMethodBase):
    """Loads NVFP4 weights of one linear layer and computes with them.

    Every part of a fused layer keeps its own FP32 global, one for each output row.
    """

    def __init__(
        self,
        names: Names,
        leaves: Sequence[str],
        site: str,
        tally: Tally,
        *,
        route: WeightRoute = WeightRoute.DEQUANTIZED,
    ) -> None:
        """Keep how the checkpoint names the tensors, which it has, and where to report bytes.

        With the route FUSED the weight stays packed, in `layer.packed_weight`.
        """
        self.names = names
        self.leaves = tuple(leaves)
        self.site = site
        self.tally = tally
        self.route = route
        self.loading: Site | None = None
        self.held: resident.Resident | None = None

    def create_weights(  # noqa: PLR0917 - the engine's signature
        self,
        layer: compat.Layer,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,  # noqa: ANN401 - the engine's signature
    ) -> None:
        """Register the parameters that the checkpoint's tensors are loaded into.

        Raises:
            ApplianceError: E_TP_GROUP if the ranks would cut a block of 16 columns.
        """
        group = self.names.group
        columns = _stored_columns(self.site, input_size, input_size_per_partition, group)
        full_rows = compat.full_part_rows(layer, output_size)
        matrices = stored_matrices(self.site, self.leaves, full_rows, input_size)
        self.loading = Site(
            matrices,
            tuple(ledger.MatrixRecord() for _ in matrices),
            tuple(output_partition_sizes),
            input_size_per_partition,
            params_dtype,
        )
        rows = sum(output_partition_sizes)
        for name, made in self._parameters(self.loading, rows, columns, extra["weight_loader"]):
            layer.register_parameter(name, made)

    def _parameters(
        self, site: Site, rows: int, columns: int, loader: Loader
    ) -> list[tuple[str, torch.nn.Parameter]]:
        names = self.names
        codes = compat.ModelWeightParameter(
            data=_unwritten_codes(rows, columns, has_words=names.has_words),
            input_dim=1,
            output_dim=0,
            weight_loader=_entering(ledger.enter_codes, site, names, loader),
        )
        scales = compat.GroupQuantScaleParameter(
            data=ledger.unwritten_scales(
                rows, columns // names.group, scale_dtype=names.scale_dtype
            ),
            input_dim=1,
            output_dim=0,
            weight_loader=_entering(ledger.enter_scales, site, names, loader),
        )
        global_loader = _global_loader(site, names)
        globals_ = weights.parameter(torch.empty(0), weight_loader=global_loader)
        unread = [
            (name, weights.parameter(torch.empty(0), weight_loader=weights.dropped))
            for name in names.activations
        ]
        return [(names.codes, codes), (names.scales, scales), (names.globals, globals_), *unread]

    def process_weights_after_loading(self, layer: compat.Layer) -> None:
        """Check that the layer is whole, repack or decode it once, and free what was loaded.

        Raises:
            ApplianceError: If a tensor is missing or carries values that no kernel may see, or if
                the decoded weights differ from the oracle's.
        """
        site = self.loading
        if site is None:
            return
        self.loading = None
        packed = self._packed(layer, site)
        if self.route is WeightRoute.FUSED:
            self.held = resident.pack(packed, abi.WeightKind.LINEAR)
            name, weight = "packed_weight", self.held.buffer
        else:
            decoded = weights.dequantize_checked(packed, site.dtype)
            name, weight = "weight", decoded[:, : site.columns].contiguous()
        weights.drop_parameters(layer, self.names.loaded)
        weights.set_plain(layer, name, weight)
        self.tally.add(packed.stored_bytes, weight.nbytes)

    def _packed(self, layer: compat.Layer, site: Site) -> Packed:
        names = self.names
        codes: torch.Tensor = getattr(layer, names.codes).data.view(torch.uint8)
        scales: torch.Tensor = getattr(layer, names.scales).data
        row_globals = torch.ones(sum(site.part_rows), dtype=torch.float32, device="cpu")
        begin = 0
        for matrix, record, rows in zip(site.matrices, site.records, site.part_rows, strict=True):
            part = slice(begin, begin + rows)
            begin += rows
            if ledger.check(record, matrix, names):
                self.tally.note_zero(matrix.name)
                ledger.clear(scales[part])
            elif names.has_global:
                row_globals[part] = record.globals[0]
        self.tally.note_globals(value for record in site.records for value in record.globals)
        ledger.check_no_sentinel(scales, self.site, names)
        labels = [matrix.name for matrix in site.matrices]
        parts = tuple(zip(labels, site.part_rows, strict=True))
        row_globals = row_globals.to(codes.device)
        return Packed(codes, scales, row_globals, names.divisor, parts)

    def apply(
        self, layer: compat.Layer, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x * w^T + bias; x is [..., K], the result [..., N]."""
        if self.held is not None:
            return kernel_ops.linear(x, self.held, bias)
        return functional.linear(x, layer.weight, bias)


def _unwritten_codes(rows: int, columns: int, *, has_words: bool) -> torch.Tensor:
    """Return room for packed codes: bytes of two, or words of eight whose bytes are the same."""
    if has_words:
        return torch.zeros(rows, columns // 8, dtype=torch.int32)
    return torch.zeros(rows, columns // 2, dtype=torch.uint8)


def _stored_columns(
    site: str, columns: int, columns_per_rank: int, group: int = NVFP4_GROUP
) -> int:
    """Return the columns that this rank holds, with the padding of a matrix that is not cut."""
    if columns_per_rank == columns:
        return -(-columns // NVFP4_GROUP) * NVFP4_GROUP
    if columns_per_rank % group:
        blocks = columns // group
        ranks = [n for n in range(1, blocks + 1) if columns % (n * group) == 0]
        ledger.refuse(
            "E_TP_GROUP",
            site,
            f"a rank's share of {columns} columns must be whole blocks of {group}",
            f"{columns_per_rank} columns a rank",
            f"use one of {ranks[:8]} ranks, or pipeline parallelism",
        )
    return columns_per_rank


def forward(
    loader: Loader, parameter: torch.nn.Parameter, loaded: torch.Tensor, shard: ShardId
) -> None:
    """Call a loader of the engine, which takes no part where a layer has none."""
    if shard is None:
        loader(parameter, loaded)
    else:
        loader(parameter, loaded, shard)


def _entering(
    enter: Callable[[ledger.MatrixRecord, ledger.Matrix, Names, torch.Tensor], None],
    site: Site,
    names: Names,
    loader: Loader,
) -> Loader:
    """Wrap a loader of the engine, which cuts and copies, so that the whole tensor is entered."""

    def load(parameter: torch.nn.Parameter, loaded: torch.Tensor, shard: ShardId = None) -> None:
        parts = parts_of(shard, len(site.matrices))
        first = site.matrices[parts[0]]
        rows = sum(site.matrices[part].rows for part in parts)
        entry = ledger.MatrixRecord()
        enter(entry, ledger.Matrix(first.name, rows, first.columns), names, loaded)
        for part in parts:
            site.records[part].merge(entry)
        forward(loader, parameter, loaded, shard)

    return load


def _global_loader(site: Site, names: Names) -> Loader:
    """Return a loader that enters the global for each part; the layer needs it nowhere else."""

    def load(_: torch.nn.Parameter, loaded: torch.Tensor, shard: ShardId = None) -> None:
        for part in parts_of(shard, len(site.matrices)):
            ledger.enter_global(site.records[part], site.matrices[part], names, loaded)

    return load
