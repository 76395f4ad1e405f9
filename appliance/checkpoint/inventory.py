"""Sorts every tensor into layers, the rest of the text model, and parts that are not served."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.checkpoint.faults import refuse
from appliance.checkpoint.linears import Entry, stored_bytes
from appliance.checkpoint.patterns import TEXT_PREFIXES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.checkpoint.outline import Outline
    from appliance.checkpoint.shards import Shards

_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")
_MTP_ROOTS = ("mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp.")
_MTP_PARTS = ("eh_proj.", "enorm.", "hnorm.", "shared_head.", "embed_tokens.")
"""Beside a usual layer, a drafter's layer has one of these."""

_MTP_LAYER = re.compile(r"\.layers\.[0-9]+\.(eh_proj|enorm|hnorm|shared_head)\b")

_OTHER_SENSES = (
    "visual.",
    "model.visual.",
    "vision_tower.",
    "model.vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
    "embed_vision.",
    "model.embed_vision.",
    "embed_audio.",
    "model.embed_audio.",
    "model.vision_embedder.",
)


@dataclass
class Inventory:
    """Tensors by place.

    Attributes:
        layers: Layer index to the tensors of the layer, by name relative to it.
        top: Tensors of the text model outside the layers: `embed_tokens.weight`, `lm_head.weight`.
        prefix: How the root of the text model is spelled, for messages: `model.`.
        mtp: Bytes and elements of multi-token prediction.
        vision: Bytes and elements of towers for other senses.
    """

    layers: dict[int, dict[str, Entry]] = field(default_factory=dict)
    top: dict[str, Entry] = field(default_factory=dict)
    prefix: str = "model."
    mtp: tuple[int, int] = (0, 0)
    vision: tuple[int, int] = (0, 0)

    def layer_name(self, layer: int) -> str:
        """Return the checkpoint's name of a layer, ending in a dot."""
        return f"{self.prefix}layers.{layer}."


def take_inventory(shards: Shards, outline: Outline) -> Inventory:
    """Sort every tensor; names of no known root land in `top`, where they are refused."""
    inventory = Inventory()
    heads = {prefix[:-1] for prefix in TEXT_PREFIXES} | {""}
    by_index: dict[tuple[str, str], dict[str, Entry]] = {}
    rest: list[tuple[str, Entry]] = []
    for header in shards.headers.values():
        for name, entry in header.forms.items():
            head, layers, tail = name.partition(".layers.")
            if layers and head in heads:
                index, _, inner = tail.partition(".")
                layer = by_index.get((head, index))
                if layer is None:
                    layer = by_index[head, index] = {}
                layer[inner] = entry
            else:
                rest.append((name, entry))
    _place_layers(inventory, by_index, outline)
    for name, entry in rest:
        _place(inventory, name, entry)
    return inventory


def _place_layers(
    inventory: Inventory, by_index: dict[tuple[str, str], dict[str, Entry]], outline: Outline
) -> None:
    count = outline.geometry.num_layers
    root = next(iter(by_index), ("model", ""))[0]
    inventory.prefix = f"{root}." if root else ""
    for (head, index), tensors in by_index.items():
        number = int(index) if _INDEX.fullmatch(index) and head == root else -1
        if 0 <= number < count:
            inventory.layers[number] = tensors
        elif count <= number < count + outline.mtp_layers or (
            number >= count and any(name.startswith(_MTP_PARTS) for name in tensors)
        ):
            for entry in tensors.values():
                inventory.mtp = _plus(inventory.mtp, entry)
        else:
            named = {f"{head}.layers.{index}.{name}": entry for name, entry in tensors.items()}
            inventory.top.update(named)


def _place(inventory: Inventory, name: str, entry: Entry) -> None:
    if name.startswith(_MTP_ROOTS):
        inventory.mtp = _plus(inventory.mtp, entry)
    elif name.startswith(_OTHER_SENSES):
        inventory.vision = _plus(inventory.vision, entry)
    else:
        prefix = next((each for each in TEXT_PREFIXES if name.startswith(each)), "")
        inventory.top[name[len(prefix) :]] = entry


def require_drafter(method: str, names: Iterable[str]) -> None:
    """Refuse speculation by multi-token prediction of a checkpoint that has no tensors for it.

    Args:
        method: How tokens are guessed, as the engine names it; empty without speculation.
        names: Modules or tensors of the checkpoint.

    Raises:
        ApplianceError: E_MTP_ABSENT, exit 30.
    """
    if not method.endswith("mtp"):
        return
    if not any(name.startswith(_MTP_ROOTS) or _MTP_LAYER.search(name) for name in names):
        what, fix = "tensors for multi-token prediction", "serve it without a speculative config"
        raise refuse("E_MTP_ABSENT", f"speculative-config {method}", what, "none", fix)


def _plus(total: tuple[int, int], entry: Entry) -> tuple[int, int]:
    return total[0] + stored_bytes(entry), total[1] + math.prod(entry[1])
