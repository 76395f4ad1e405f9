"""One way to cut a model over ranks: tensor-parallel width times pipeline depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.checkpoint.summary import Cut

if TYPE_CHECKING:
    from appliance.checkpoint.summary import CheckpointSummary, Geometry
    from appliance.plan.launch_plan import ParallelKind

NVFP4_GROUP = 16
VOCABULARY_STEP = 64
"""vLLM pads the vocabulary to a multiple of this before it cuts it."""


@dataclass(frozen=True)
class Split:
    """Tensor-parallel width and pipeline depth."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Processes that hold a part of the model."""
        return self.tensor * self.pipeline

    @property
    def kind(self) -> ParallelKind:
        """The configuration's word for it."""
        if self.ranks == 1:
            return "single"
        return "tensor" if self.pipeline == 1 else "pipeline"

    def __str__(self) -> str:
        """Return `single`, `tensor=2`, `pipeline=2` or `tensor=2 pipeline=2`."""
        parts = [f"tensor={self.tensor}"] if self.tensor > 1 else []
        parts += [f"pipeline={self.pipeline}"] if self.pipeline > 1 else []
        return " ".join(parts) or "single"

    def stage(self, rank: int) -> int:
        """Return the pipeline stage of a rank; tensor-parallel neighbours follow each other."""
        return rank // self.tensor

    def layers(self, stage: int, count: int) -> range:
        """Return the layers of a pipeline stage.

        As vLLM deals them out: evenly; what is left over goes one each to the stages before the
        last, counted from the end, since the last one also holds the head.
        """
        each = [count // self.pipeline] * self.pipeline
        for back in range(2, count % self.pipeline + 2):
            each[-back] += 1
        start = sum(each[:stage])
        return range(start, start + each[stage])

    def share(self, cut: Cut, amount: int, kv_heads: int) -> int:
        """Return the part of an amount (bytes, elements, rows) that one rank of a stage holds."""
        if cut is Cut.WHOLE:
            return amount
        if cut is Cut.KV_HEADS:
            return amount * self.kv_heads(kv_heads) // kv_heads
        return amount // self.tensor

    def kv_heads(self, kv_heads: int) -> int:
        """Return the KV heads of one rank; fewer heads than ranks are replicated."""
        return max(1, kv_heads // self.tensor)


def padded_vocabulary(geometry: Geometry) -> int:
    """Return the rows of the embedding as the engine holds it."""
    return -(-geometry.vocab_size // VOCABULARY_STEP) * VOCABULARY_STEP


@dataclass(frozen=True)
class Obstacle:
    """Why a split is impossible.

    Attributes:
        code: `TP_INVALID`, `E_TP_GROUP` or `PP_INVALID`.
        what: What does not divide.
        value: The division that fails.
    """

    code: str
    what: str
    value: str


def obstacles(summary: CheckpointSummary, split: Split) -> list[Obstacle]:
    """Return what stands against a split of this model, nothing if it is possible."""
    geometry, width = summary.geometry, split.tensor
    dimensions = {
        "query heads (num_attention_heads)": geometry.num_heads,
        "padded vocabulary": padded_vocabulary(geometry),
        "MLP width (intermediate_size)": _mlp_width(geometry),
        "expert width (moe_intermediate_size)": geometry.moe_intermediate_size,
        "key heads of linear attention": geometry.recurrent_heads[0],
        "value heads of linear attention": geometry.recurrent_heads[1],
    }
    found = [
        Obstacle("TP_INVALID", f"{name} must be a multiple of {width}", f"{size}")
        for name, size in dimensions.items()
        if size % width
    ]
    heads = geometry.num_kv_heads
    if heads % width and width % heads:
        what = f"KV heads must divide {width} or be a multiple of it"
        found.append(Obstacle("TP_INVALID", what, f"{heads}"))
    found += _split_groups(summary, width)
    if split.pipeline > geometry.num_layers:
        what = f"at least {split.pipeline} layers for as many stages"
        found.append(Obstacle("PP_INVALID", what, f"{geometry.num_layers}"))
    return found


def _mlp_width(geometry: Geometry) -> int:
    """The dense width; models of experts only may name one that no layer has."""
    return 0 if geometry.num_experts else geometry.intermediate_size


def _split_groups(summary: CheckpointSummary, width: int) -> list[Obstacle]:
    """A block scale covers 16 inputs; a cut inside pairs weights of one rank with another's."""
    group = summary.group_size or NVFP4_GROUP
    return [
        Obstacle(
            "E_TP_GROUP",
            f"inputs a rank of {module} must be a multiple of {group}",
            f"{columns} / {width} = {columns / width:g}",
        )
        for module, columns in summary.input_widths
        if columns % (width * group)
    ]


def possible_splits(summary: CheckpointSummary, devices: int) -> list[Split]:
    """Return every split over at most so many devices that this model allows."""
    return [
        split
        for tensor in range(1, devices + 1)
        for pipeline in range(1, devices // tensor + 1)
        if not obstacles(summary, split := Split(tensor, pipeline))
    ]
