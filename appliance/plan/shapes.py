"""The matrices of one rank as the kernels get them: cut, fused, and padded to whole tiles."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from appliance.checkpoint.summary import Cut

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from appliance.checkpoint.outline import Experts, LayerOutline, Linear, Outline
    from appliance.plan.split import Split

TILE = 64
"""Rows and columns of a packed weight are padded to a multiple of this; what is added is zero."""


@dataclass(frozen=True)
class RankShape:
    """One matrix of a rank, the same in several layers.

    Attributes:
        module: Name below a layer; parts that the engine fuses are one matrix.
        form: How it is stored: `nvfp4`, `fp8` or `dense`.
        rows: Output features of the rank (N).
        columns: Input features of the rank (K).
        count: How many of them the model has.
    """

    module: str
    form: str
    rows: int
    columns: int
    count: int = 1

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns as they are stored for the kernels; a dense matrix is as it is."""
        if self.form != "nvfp4":
            return self.rows, self.columns
        return -(-self.rows // TILE) * TILE, -(-self.columns // TILE) * TILE


def rank_shapes(
    outline: Outline, forms: Mapping[str, Mapping[str, str]], split: Split
) -> tuple[RankShape, ...]:
    """Return every matrix of the layers for a cut that is possible, in the order of the layers.

    Args:
        outline: The model.
        forms: For each kind of layer, module to form.
        split: How it is cut.
    """
    count = Counter[RankShape]()
    for kind in outline.kinds:
        heads = outline.geometry.num_kv_heads
        count.update(_layer(outline.layers[kind], forms.get(kind, {}), split, heads))
    return tuple(replace(shape, count=number) for shape, number in count.items())


def _layer(
    layer: LayerOutline, forms: Mapping[str, str], split: Split, kv_heads: int
) -> Iterable[RankShape]:
    fused: dict[tuple[str, str], RankShape] = {}
    for module, linear in layer.linears.items():
        name, form = linear.site or module, forms.get(module, "dense")
        rows, columns = _cut(linear, split, kv_heads)
        before = fused.get((name, form))
        whole = rows if before is None else before.rows + rows
        fused[name, form] = RankShape(name, form, whole, columns)
    return [*fused.values(), *_experts(layer.experts, forms, split)]


def _experts(
    experts: Experts | None, forms: Mapping[str, str], split: Split
) -> Iterable[RankShape]:
    if experts is None:
        return
    inside = f"{experts.prefix}."
    form = next((form for name, form in forms.items() if name.startswith(inside)), "dense")
    width = experts.intermediate // split.tensor
    for name, rows, columns in (
        ("gate_up_proj", 2 * width, experts.hidden),
        ("down_proj", experts.hidden, width),
    ):
        shape = RankShape(f"{inside}*.{name}", form, rows, columns)
        yield from [shape] * experts.count


def _cut(linear: Linear, split: Split, kv_heads: int) -> tuple[int, int]:
    if linear.cut is Cut.COLUMNS:
        return linear.rows, split.share(linear.cut, linear.columns, kv_heads)
    return split.share(linear.cut, linear.rows, kv_heads), linear.columns
