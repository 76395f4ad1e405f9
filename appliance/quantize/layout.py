"""Decides from headers and config what becomes of every tensor and what the output holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.checkpoint.document import as_object, is_named
from appliance.checkpoint.faults import FaultList, refuse
from appliance.checkpoint.writer import TensorSpec
from appliance.quantize.native import DTYPES
from appliance.quantize.scheme import NVFP4
from appliance.quantize.sites import ARCHITECTURES, Architecture, Site

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from appliance.checkpoint.tensors import TensorEntry, TensorReader
    from appliance.quantize.scheme import Scheme

_QUANTIZED_SUFFIXES = (
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_scale_inv",
    ".weight_global_scale",
    ".qweight",
    ".weight_scales",
)
_MATRIX_AXES = 2


@dataclass(frozen=True)
class Piece:
    """A matrix inside a stack of experts [E, rows, K]: rows `begin` to `end` of one expert."""

    expert: int
    begin: int
    end: int


@dataclass(frozen=True)
class Item:
    """One source tensor, or one matrix of a stacked one, and what becomes of it.

    Attributes:
        entry: The source tensor.
        module: Module name of the matrix; the tensor's own name for a copied one.
        site: The site it is quantized in, or None if it is copied.
        piece: Which matrix of a stack it is, None for a tensor of its own.
        scheme: What a quantized one is stored as.
    """

    entry: TensorEntry
    module: str
    site: Site | None
    scheme: Scheme
    piece: Piece | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, or of the copied tensor."""
        if self.piece is None:
            return self.entry.shape
        return (self.piece.end - self.piece.begin, self.entry.shape[-1])

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def view(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Return this item's part of its source tensor, contiguous and not copied."""
        if self.piece is None:
            return stored
        matrix: NDArray[Any] = stored[self.piece.expert, self.piece.begin : self.piece.end]
        return matrix

    def float32(self, reader: TensorReader) -> NDArray[np.float32]:
        """Copy the matrix as contiguous FP32, nothing of its neighbours in a stack."""
        stored = self.view(reader.array(self.entry.name))
        if self.entry.dtype == "BF16":
            return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.array(stored, np.float32, order="C")

    def outputs(self) -> tuple[TensorSpec, ...]:
        """The tensors it becomes: itself, or codes, block scales and global scale."""
        if self.site is None:
            return (TensorSpec(self.entry.name, self.entry.dtype, self.entry.shape),)
        rows, columns = self.shape
        return self.scheme.outputs(self.module, rows, columns)


@dataclass(frozen=True)
class Layout:
    """The whole job.

    Attributes:
        shards: Source file name to its items; the output has the same files.
        modules: Module name to its quantized item.
        ignore: The `ignore` list of the output's quantization_config.
    """

    shards: Mapping[str, tuple[Item, ...]]
    modules: Mapping[str, Item]
    ignore: tuple[str, ...]

    @property
    def weights(self) -> int:
        """Number of weights that are quantized."""
        return sum(item.elements for item in self.modules.values())

    def specs(self) -> dict[str, tuple[TensorSpec, ...]]:
        """Every output tensor by file."""
        return {
            shard: tuple(spec for item in items for spec in item.outputs())
            for shard, items in self.shards.items()
        }


def make_layout(reader: TensorReader, config: Mapping[str, Any], scheme: Scheme = NVFP4) -> Layout:
    """Sort every tensor of a dense checkpoint into quantized and dense.

    Args:
        reader: The opened source.
        config: Its config.json.
        scheme: What a matrix will be stored as.

    Raises:
        ApplianceError: Exit 30 with every fault: QUANT_SOURCE (already quantized, or a type that is
            not F16, BF16 or F32), QUANT_ARCHITECTURE, QUANT_UNKNOWN_TENSOR, QUANT_BLOCK (K is not a
            multiple of the scheme's block), QUANT_EXPERTS, QUANT_PART_MISSING, QUANT_NOTHING,
            E_DUPLICATE_TENSOR.
    """
    faults = FaultList()
    _refuse_quantized(reader, config, faults)
    faults.raise_if_any(str(reader.root))
    sorter = _Sorter(reader, architecture_of(reader, config), config, scheme, faults)
    shards = {
        shard: tuple(item for entry in reader.in_shard(shard) for item in sorter.items(entry))
        for shard in reader.shards
    }
    layout = Layout(shards, _modules(reader, shards, faults), tuple(sorted(sorter.ignore)))
    _check_parts(reader, layout, faults)
    if not layout.weights and not faults.faults:
        faults.add(
            "QUANT_NOTHING",
            str(reader.root),
            "at least one linear layer to quantize",
            "none",
            "check that this is a whole language model",
        )
    faults.raise_if_any(str(reader.root))
    return layout


@dataclass
class _Sorter:
    """Sorts tensor after tensor; collects faults and what the output's `ignore` must name."""

    reader: TensorReader
    architecture: Architecture
    config: Mapping[str, Any]
    scheme: Scheme
    faults: FaultList
    ignore: set[str] = field(default_factory=lambda: {"lm_head"})

    def items(self, entry: TensorEntry) -> tuple[Item, ...]:
        """Return what becomes of one tensor: one item, or one for every matrix of a stack."""
        dense = self.architecture.dense_group(entry.name)
        if dense is not None:
            self.ignore |= {dense.ignore} - {""}
            return (Item(entry, entry.name, None, self.scheme),)
        if self.architecture.is_stack(entry.name):
            return self._stack(entry)
        site = self.architecture.site_of(entry.name)
        if site is None:
            self._fault(
                "QUANT_UNKNOWN_TENSOR",
                entry,
                "a tensor that the site table of this architecture covers",
                "use a checkpoint with the usual tensor names",
            )
        elif len(entry.shape) != _MATRIX_AXES:
            self._fault("QUANT_BLOCK", entry, "a matrix [N, K]", "use a checkpoint of this model")
        else:
            self._check_blocks(entry)
        return (Item(entry, entry.name.rpartition(".")[0], site, self.scheme),)

    def _stack(self, entry: TensorEntry) -> tuple[Item, ...]:
        """Take a stack of experts apart: gate rows come before up rows."""
        base, _, kind = entry.name.rpartition(".")
        experts = entry.shape[0] if entry.shape else 0
        rows, columns = self._stack_shape(kind)
        if entry.shape != (experts, rows, columns) or not rows:
            what = f"a stack [E, {rows}, {columns}] by the widths in config.json"
            self._fault("QUANT_EXPERTS", entry, what, "use a checkpoint with one matrix an expert")
            return ()
        self._check_blocks(entry)
        leaves = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
        height = rows // len(leaves)
        return tuple(
            Item(
                entry,
                f"{base}.{expert}.{leaf}",
                self.architecture.site_of(f"{base}.{expert}.{leaf}.weight"),
                self.scheme,
                Piece(expert, number * height, (number + 1) * height),
            )
            for expert in range(experts)
            for number, leaf in enumerate(leaves)
        )

    def _stack_shape(self, kind: str) -> tuple[int, int]:
        """Rows and columns of one expert in a stack; (0, 0) if config.json does not say."""
        text = as_object(self.config.get("text_config")) or self.config
        width, hidden = text.get("moe_intermediate_size"), text.get("hidden_size")
        if not isinstance(width, int) or not isinstance(hidden, int):
            return (0, 0)
        return (hidden, width) if kind == "down_proj" else (2 * width, hidden)

    def _check_blocks(self, entry: TensorEntry) -> None:
        block = self.scheme.block
        if entry.shape[-1] % block or not entry.elements:
            what = f"K is a multiple of {block} and there are weights"
            fix = (
                f"use a model with widths in multiples of {block}"
                if block == NVFP4.block
                else "use --mode fast, whose blocks are 16 weights, or another model"
            )
            self._fault("QUANT_BLOCK", entry, what, fix)
        elif entry.dtype not in DTYPES:
            what = f"one of {', '.join(DTYPES)}"
            self._fault("QUANT_SOURCE", entry, what, "start from the dense checkpoint")

    def _fault(self, code: str, entry: TensorEntry, what: str, fix: str) -> None:
        where = f"{self.reader.root / entry.shard} {entry.name}"
        self.faults.add(code, where, what, f"{entry.dtype} {list(entry.shape)}", fix)


def _refuse_quantized(reader: TensorReader, config: Mapping[str, Any], faults: FaultList) -> None:
    fix = "start from the dense FP16, BF16 or FP32 checkpoint"
    for stated in ("quantization_config", "compression_config"):
        text = as_object(config.get("text_config")) or {}
        if config.get(stated) or text.get(stated):
            where = f"{reader.root / 'config.json'} {stated}"
            faults.add("QUANT_SOURCE", where, "a dense source", "a quantized one", fix)
            return
    if is_named(reader.root / "hf_quant_config.json"):
        where = str(reader.root / "hf_quant_config.json")
        faults.add("QUANT_SOURCE", where, "a dense source", "a quantized one", fix)
        return
    for name in reader.names():
        if name.endswith(_QUANTIZED_SUFFIXES):
            where = f"{reader.root / reader.entry(name).shard} {name}"
            faults.add("QUANT_SOURCE", where, "a dense source", "a tensor of a quantized one", fix)


def architecture_of(reader: TensorReader, config: Mapping[str, Any]) -> Architecture:
    """Return the site table of a model.

    Raises:
        ApplianceError: QUANT_ARCHITECTURE, exit 30.
    """
    model_type = str(config.get("model_type"))
    if model_type not in ARCHITECTURES:
        raise refuse(
            "QUANT_ARCHITECTURE",
            f"{reader.root / 'config.json'} model_type",
            f"one of {', '.join(ARCHITECTURES)}",
            model_type,
            "quantize it with a tool that knows this architecture",
        )
    return ARCHITECTURES[model_type]


def _modules(
    reader: TensorReader, shards: Mapping[str, tuple[Item, ...]], faults: FaultList
) -> dict[str, Item]:
    """Index the quantized items; a matrix must not be there both stacked and by itself."""
    modules: dict[str, Item] = {}
    for items in shards.values():
        for item in items:
            if item.site is None:
                continue
            if item.module in modules:
                faults.add(
                    "E_DUPLICATE_TENSOR",
                    f"{reader.root / item.entry.shard} {item.entry.name}",
                    f"one source of {item.module}",
                    f"another in {modules[item.module].entry.name}",
                    "remove one of them from the checkpoint",
                )
            modules[item.module] = item
    return modules


def _check_parts(reader: TensorReader, layout: Layout, faults: FaultList) -> None:
    """Refuse a site of which only some parts are there: its shared scale would be wrong."""
    for item in layout.modules.values():
        for part in item.site.parts if item.site else ():
            if part not in layout.modules:
                faults.add(
                    "QUANT_PART_MISSING",
                    f"{reader.root / item.entry.shard} {item.entry.name}",
                    f"every part of {item.site.name if item.site else ''} is there",
                    f"no {part}",
                    "download the checkpoint again",
                )
