"""Which tensors of a checkpoint make up each quantized matrix: decided by names and types alone.

The one table of spellings: per-module suffixes joined by a dot, and those of stacked experts joined
by an underscore.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from appliance.checkpoint.header import Form

NVFP4_GROUP = 16
QUASAR_GROUP = 128
FP8_BLOCK = 128
"""Rows and columns that share a scale in block FP8."""


class Layout(StrEnum):
    """Whose names a quantized matrix has."""

    MODELOPT = "modelopt"
    COMPRESSED_TENSORS = "compressed-tensors"
    QUASAR = "quasar-st"
    FP8 = "fp8"
    MXFP4 = "mxfp4"


STACKED = ("gate_up_proj", "down_proj")
"""Tensors that hold one matrix of every expert; gate rows come first."""

STACKED_PARTS = ("weight_scale_2", "weight_scale", "weight_scale_inv", "input_scale")

UNREAD = frozenset(
    {
        "input_scale",
        "input_global_scale",
        "k_scale",
        "v_scale",
        "q_scale",
        "k_bias",
        "v_bias",
        "prob_output_scale",
        "weight_shape",
        "weight_zero_point",
    }
)
"""Suffixes that exporters write and no weight-only path reads."""


@dataclass(frozen=True)
class Stored:
    """One quantized matrix, or the stack of one matrix of every expert.

    Attributes:
        module: Name in the checkpoint.
        layout: Whose names it has.
        codes: Name of the tensor of codes.
        scales: Name of the tensor of scales.
        factor: Name of the tensor of the global, None where the layout has none.
    """

    module: str
    layout: Layout
    codes: str
    scales: str
    factor: str | None = None

    @property
    def is_divisor(self) -> bool:
        """Whether the stored global divides: the name decides, never the magnitude."""
        return self.layout is Layout.COMPRESSED_TENSORS


def find_stored(forms: Mapping[str, Form]) -> tuple[list[Stored], list[str]]:
    """Sort the tensors of a checkpoint into quantized matrices and dense tensors.

    Args:
        forms: Tensor name to dtype and shape.

    Returns:
        Matrices whose companions are all there, in the order of the names, and the names of all
        other tensors but those that nothing reads.
    """
    modules: dict[str, dict[str, str]] = {}
    dense: list[str] = []
    for name in forms:
        module, part = split_name(name)
        modules.setdefault(module, {})[part] = name
    matrices: list[Stored] = []
    for module, parts in modules.items():
        found = _matrix(module, parts, forms)
        if found is None:
            dense += [name for part, name in parts.items() if part not in UNREAD]
            continue
        matrices.append(found)
        taken = {found.codes, found.scales, found.factor}
        dense += [name for part, name in parts.items() if part not in UNREAD and name not in taken]
    return sorted(matrices, key=lambda each: each.module), sorted(dense)


def split_name(name: str) -> tuple[str, str]:
    """Return module and part of a tensor: `a.b`, `weight_scale`.

    A stacked tensor is its own module: `experts.down_proj_weight_scale` is part `weight_scale` of
    `experts.down_proj`, and `experts.down_proj` itself is its part `weight`.
    """
    module, _, part = name.rpartition(".")
    for leaf in STACKED:
        if part == leaf:
            return name, "weight"
        if part.startswith(f"{leaf}_") and part.removeprefix(f"{leaf}_") in STACKED_PARTS:
            stem = f"{module}.{leaf}" if module else leaf
            return stem, part.removeprefix(f"{leaf}_")
    return module, part


def _matrix(module: str, parts: Mapping[str, str], forms: Mapping[str, Form]) -> Stored | None:
    weight = forms[parts["weight"]][0] if "weight" in parts else ""
    if _has(parts, "weight_packed", "weight_scale", "weight_global_scale"):
        return Stored(
            module,
            Layout.COMPRESSED_TENSORS,
            parts["weight_packed"],
            parts["weight_scale"],
            parts["weight_global_scale"],
        )
    if _has(parts, "qweight", "weight_scales"):
        factor = parts.get("weight_scale_2")
        return Stored(module, Layout.QUASAR, parts["qweight"], parts["weight_scales"], factor)
    scale = parts.get("weight_scale", parts.get("weight_scale_inv"))
    if scale is None or weight not in ("U8", "F8_E4M3"):
        return None
    if weight == "F8_E4M3":
        return Stored(module, Layout.FP8, parts["weight"], scale)
    if "weight_scale_2" in parts:
        return Stored(module, Layout.MODELOPT, parts["weight"], scale, parts["weight_scale_2"])
    is_mx = forms[scale][0] in ("U8", "F8_E8M0")
    return Stored(module, Layout.MXFP4, parts["weight"], scale) if is_mx else None


def _has(parts: Iterable[str], *names: str) -> bool:
    return set(names) <= set(parts)
