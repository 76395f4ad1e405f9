"""Bytes of weights that one rank holds after loading."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.checkpoint.summary import Cut, Kind, TensorGroup
from appliance.plan.formats import WIDE_GROUP
from appliance.plan.launch_plan import Item
from appliance.plan.split import Split, padded_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.checkpoint.summary import CheckpointSummary

FP32_BYTES = 4


@dataclass(frozen=True)
class WeightForm:
    """How the engine holds weights.

    Attributes:
        element_bytes: Bytes of one number of the compute type: 2 for FP16, 4 for FP32.
        packed: NVFP4 weights stay packed; else they are decoded once after loading.
    """

    element_bytes: int
    packed: bool

    @property
    def name(self) -> str:
        """The compute type's name."""
        return "FP16" if self.element_bytes < FP32_BYTES else "FP32"


def weight_items(
    summary: CheckpointSummary, split: Split, rank: int, form: WeightForm
) -> tuple[Item, ...]:
    """Return the weights of one rank by what they are for, nothing for what it lacks."""
    stage = split.stage(rank)
    layers = split.layers(stage, summary.geometry.num_layers)
    total: Counter[str] = Counter()
    for group in summary.groups:
        inside = group.layer in layers if group.layer is not None else stage == split.pipeline - 1
        if inside:
            for name, count in _layer_bytes(group, summary, split, form):
                total[name] += count
    total["weights.embedding"] = _embedding(summary, split, form) if stage == 0 else 0
    if stage == split.pipeline - 1:
        total["weights.lm_head"] = _head(summary, split, form)
    is_wide = summary.group_size == WIDE_GROUP
    scales = "one FP16 or FP32 for 128 weights" if is_wide else "one E4M3 for 16 weights"
    words = {"form": form, "split": split, "scales": scales}
    formulas = dict(_FORMULAS)
    if form.packed and _packed_head_scales(summary) is not None:
        formulas["weights.lm_head"] = _PACKED_HEAD
    return tuple(
        Item(name, total[name], formula.format(**words), _SOURCE)
        for name, formula in formulas.items()
        if total[name]
    )


def _layer_bytes(
    group: TensorGroup, summary: CheckpointSummary, split: Split, form: WeightForm
) -> Iterator[tuple[str, int]]:
    kv_heads = summary.geometry.num_kv_heads

    def share(amount: int) -> int:
        return split.share(group.cut, amount, kv_heads)

    if group.kind is Kind.CODES and form.packed:
        yield "weights.codes", share(group.bytes_stored)
        rows = group.rows if group.cut is Cut.COLUMNS else share(group.rows)
        yield "weights.globals", rows * FP32_BYTES
    elif group.kind is Kind.BLOCK_SCALES and form.packed:
        yield "weights.block_scales", share(group.bytes_stored)
    elif group.kind in (Kind.CODES, Kind.FP8):
        yield "weights.decoded", share(group.elements) * form.element_bytes
    elif group.kind is Kind.DENSE:
        plain = group.elements - group.fp32_elements
        count = share(plain) * form.element_bytes + share(group.fp32_elements) * FP32_BYTES
        yield "weights.dense", count


def _embedding(summary: CheckpointSummary, split: Split, form: WeightForm) -> int:
    geometry = summary.geometry
    rows = padded_vocabulary(geometry) // split.tensor
    return rows * geometry.hidden_size * form.element_bytes


def _head(summary: CheckpointSummary, split: Split, form: WeightForm) -> int:
    """A tied head is the embedding itself, unless the first and the last stage are two ranks."""
    geometry = summary.geometry
    if geometry.tied_embeddings:
        return 0 if split.pipeline == 1 else _embedding(summary, split, form)
    scales = _packed_head_scales(summary) if form.packed else None
    if scales is None:
        return _embedding(summary, split, form)
    row = geometry.hidden_size // 2 + scales + FP32_BYTES
    return padded_vocabulary(geometry) // split.tensor * row


def _packed_head_scales(summary: CheckpointSummary) -> int | None:
    """Return the bytes of block scales of one row of a packed head, None for other heads."""
    heads = [group for group in summary.groups if group.kind is Kind.LM_HEAD]
    stored = sum(group.bytes_stored for group in heads)
    weights = sum(group.elements for group in heads)
    if not 0 < stored < weights:
        return None
    # The head's global, four bytes, is less than a byte a row.
    return (stored - weights // 2) // (weights // summary.geometry.hidden_size)


_SOURCE = "safetensors headers; cut as vLLM 0.27.1 cuts the module"
_VOCABULARY = "vocabulary padded to 64 x hidden x {form.element_bytes} B / {split.tensor}"
_PACKED_HEAD = "vocabulary padded to 64, packed as the other matrices, / {split.tensor}"
_FORMULAS = {
    "weights.codes": "packed E2M1, half a byte a weight, / {split.tensor} by tensor cut",
    "weights.block_scales": "{scales}, / {split.tensor} by tensor cut",
    "weights.globals": "one FP32 for each output row of a rank",
    "weights.decoded": "NVFP4 and FP8 parts decoded after loading, {form.element_bytes} B a weight",
    "weights.embedding": _VOCABULARY,
    "weights.lm_head": _VOCABULARY,
    "weights.dense": "norms, biases, gates and unquantized linears in {form.name}",
}
