"""The tensors a model must have, by layer: what the headers are held against."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.checkpoint.summary import Cut

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.checkpoint.summary import Geometry


@dataclass(frozen=True)
class Linear:
    """One matrix that may be quantized.

    Attributes:
        rows: Output features.
        columns: Input features.
        cut: How tensor parallelism cuts it.
        site: Linears of one name are fused by the engine and must share one format; empty if alone.
    """

    rows: int
    columns: int
    cut: Cut
    site: str = ""


@dataclass(frozen=True)
class Other:
    """A tensor that is never quantized: norm, bias, convolution, gate state.

    Attributes:
        shape: Its sizes.
        cut: How tensor parallelism cuts it.
        required: A checkpoint without it is incomplete.
        keep_fp32: The engine holds it in FP32 whatever the compute type is.
    """

    shape: tuple[int, ...]
    cut: Cut = Cut.WHOLE
    required: bool = True
    keep_fp32: bool = False


@dataclass(frozen=True)
class Experts:
    """Routed experts of one layer, stored one by one or stacked.

    Attributes:
        prefix: Module that holds them, relative to the layer.
        count: Experts.
        hidden: Width of the residual stream.
        intermediate: Width of one expert.
    """

    prefix: str
    count: int
    hidden: int
    intermediate: int


@dataclass(frozen=True)
class LayerOutline:
    """Tensors of one kind of layer, by name relative to the layer."""

    linears: Mapping[str, Linear]
    others: Mapping[str, Other]
    experts: Experts | None = None


@dataclass(frozen=True)
class Outline:
    """The whole language model.

    Attributes:
        geometry: Its shape.
        kinds: Key into `layers` for each transformer layer.
        layers: The kinds of layers.
        mtp_layers: Layers for multi-token prediction that the configuration declares.
        optional_top: Tensors outside the layers beyond embedding, norm and head.
    """

    geometry: Geometry
    kinds: tuple[str, ...]
    layers: Mapping[str, LayerOutline]
    mtp_layers: int = 0
    optional_top: frozenset[str] = field(default_factory=frozenset)
