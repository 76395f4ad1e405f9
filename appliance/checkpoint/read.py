"""Summarizes a checkpoint from its headers and configuration; reads no weight."""

from __future__ import annotations

import gc
import hashlib
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from appliance.checkpoint.config import ModelConfig, read_config
from appliance.checkpoint.document import is_named
from appliance.checkpoint.families import outline
from appliance.checkpoint.faults import FaultList, refuse
from appliance.checkpoint.inventory import Inventory, take_inventory
from appliance.checkpoint.layers import tally_layer
from appliance.checkpoint.legacy import is_quasar, open_container
from appliance.checkpoint.metadata import LEGACY_NAME, read_rules
from appliance.checkpoint.notes import chat_template, notes, tokenizer
from appliance.checkpoint.rules import Lenient
from appliance.checkpoint.shards import Shards, read_shards
from appliance.checkpoint.summary import CheckpointSummary, Cut, Kind, TensorGroup
from appliance.checkpoint.top import tally_top
from appliance.checkpoint.verdict import Verdict, judge

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from appliance.checkpoint.layers import Signature
    from appliance.checkpoint.linears import Tally
    from appliance.checkpoint.outline import Outline


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint that passed: its parts as read.

    Attributes:
        config: Its configuration.
        outline: The model that the configuration describes.
        shards: Its files.
        inventory: Its tensors by place.
        tallies: What each layer adds up to.
        verdict: What it is.
    """

    config: ModelConfig
    outline: Outline
    shards: Shards
    inventory: Inventory
    tallies: dict[int | None, Tally]
    verdict: Verdict


def summarize(path: Path, lenient: Lenient = Lenient.NONE) -> CheckpointSummary:
    """Return what the plan needs to know of a checkpoint directory.

    Args:
        path: The directory.
        lenient: What is done with modules that are excluded and packed all the same.

    Raises:
        ApplianceError: Exit 31 if a file is corrupt (truncated, too long, pointer, bad header), 30
            if the checkpoint is missing, unsupported, or contradicts itself.
    """
    with _no_collections():
        return summary_of(read_checkpoint(path, lenient))


@contextmanager
def _no_collections() -> Generator[None]:
    """Headers make half a million objects that all live on; walking them costs a third more."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_checkpoint(path: Path, lenient: Lenient = Lenient.NONE) -> Checkpoint:
    """Read configuration and headers of a checkpoint directory and judge them.

    Args:
        path: The directory.
        lenient: What is done with modules that are excluded and packed all the same.

    Raises:
        ApplianceError: As `summarize`.
    """
    if is_quasar(path):
        found, fix = open_container(path).path.name, "convert it with `appliance convert`"
        raise refuse("E_CONTAINER", str(path), "safetensors", f"a QUASAR container, {found}", fix)
    if not path.is_dir():
        read_shards(path)  # says why: else its config.json alone would be missed
    config = read_config(path)
    rules = replace(read_rules(config), lenient=lenient)
    shape = outline(config)
    shards = read_shards(path)
    inventory = take_inventory(shards, shape)
    faults = FaultList()
    tallies = _tally(inventory, shape)
    verdict = judge(rules, inventory, shape, tallies, faults)
    faults.raise_if_any(str(path))
    return Checkpoint(config, shape, shards, inventory, tallies, verdict)


def _tally(inventory: Inventory, shape: Outline) -> dict[int | None, Tally]:
    """Return the tally of each layer, and under None that of the tensors outside the layers."""
    known: dict[str, list[tuple[Signature, Tally]]] = defaultdict(list)
    tallies: dict[int | None, Tally] = {None: tally_top(inventory.top, shape)}
    for layer, kind in enumerate(shape.kinds):
        signature = inventory.layers.get(layer, {})
        same = next((tally for other, tally in known[kind] if other == signature), None)
        if same is None:
            same = tally_layer(signature, shape.layers[kind])
            known[kind].append((signature, same))
        tallies[layer] = same
    return tallies


def summary_of(found: Checkpoint) -> CheckpointSummary:
    """Return what the plan needs to know of a checkpoint that was read."""
    shards, verdict = found.shards, found.verdict
    root = shards.root
    return CheckpointSummary(
        path=root,
        format=verdict.format,
        producer=verdict.producer,
        group_size=verdict.group_size,
        geometry=found.outline.geometry,
        groups=_groups(found.tallies, found.inventory),
        files={name: header.file_bytes for name, header in shards.headers.items()},
        tensor_count=sum(len(header.forms) for header in shards.headers.values()),
        largest_shard_bytes=max(header.file_bytes for header in shards.headers.values()),
        input_widths=verdict.widths,
        has_tokenizer=tokenizer(root),
        has_chat_template=chat_template(root),
        notes=notes(
            found.config,
            found.outline,
            shards,
            inventory=found.inventory,
            tallies=found.tallies,
            verdict=verdict,
        ),
        digest=_digest(root, shards),
    )


def _groups(tallies: dict[int | None, Tally], inventory: Inventory) -> tuple[TensorGroup, ...]:
    groups = [
        TensorGroup(kind, layer, cut, share.stored, share.elements, share.rows, share.fp32)
        for layer, tally in tallies.items()
        for (kind, cut), share in tally.shares.items()
    ]
    groups += [
        TensorGroup(kind, None, Cut.WHOLE, stored, elements)
        for kind, (stored, elements) in (
            (Kind.MTP, inventory.mtp),
            (Kind.VISION, inventory.vision),
        )
        if stored
    ]
    return tuple(groups)


def _digest(root: Path, shards: Shards) -> str:
    digest = hashlib.sha256()
    for name in ("config.json", LEGACY_NAME):
        if is_named(root / name):
            content = (root / name).read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    for name, header in shards.headers.items():
        digest.update(f"{name}\0{header.file_bytes}\0".encode() + header.raw)
    return digest.hexdigest()
