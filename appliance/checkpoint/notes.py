"""Remarks on a checkpoint that is served all the same, and the files beside its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.checkpoint.document import as_object, is_named, is_regular, read_document

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.checkpoint.config import ModelConfig
    from appliance.checkpoint.inventory import Inventory
    from appliance.checkpoint.linears import Tally
    from appliance.checkpoint.outline import Outline
    from appliance.checkpoint.shards import Shards
    from appliance.checkpoint.verdict import Verdict

_BLOCK_SHAPE = [1, 16, 16, 16]


def tokenizer(root: Path) -> bool:
    """Tell whether a tokenizer lies beside the weights."""
    single = ("tokenizer.json", "tokenizer.model", "tekken.json")
    pair = ("vocab.json", "merges.txt")
    return any(is_regular(root / name) for name in single) or all(
        is_regular(root / name) for name in pair
    )


def chat_template(root: Path) -> bool:
    """Tell whether a chat template lies beside the weights or in the tokenizer's configuration."""
    if any(is_regular(root / name) for name in ("chat_template.jinja", "chat_template.json")):
        return True
    settings = root / "tokenizer_config.json"
    return is_named(settings) and bool(read_document(settings).get("chat_template"))


def notes(
    config: ModelConfig,
    outline: Outline,
    shards: Shards,
    *,
    inventory: Inventory,
    tallies: dict[int | None, Tally],
    verdict: Verdict,
) -> tuple[str, ...]:
    """Return `W_` and `I_` codes with a sentence each."""
    found: list[str] = []
    if any(tally.activation_scales for tally in tallies.values()):
        found.append("W_ACT_IGNORED: activation scales are not read, activations stay FP16")
    if verdict.kv_fp8 or any(tally.kv_scales for tally in tallies.values()):
        found.append("W_KV_FP8_IGNORED: Volta has no FP8, the KV cache is FP16")
    found += overruled(verdict)
    if outline.mtp_layers and not inventory.mtp[0]:
        found.append("W_MTP_ABSENT: declared layers for multi-token prediction have no tensors")
    if inventory.mtp[0]:
        found.append("I_MTP_SKIPPED: layers for multi-token prediction are not loaded")
    if inventory.vision[0]:
        found.append("I_TEXT_ONLY: towers for images and sound are not loaded")
    shape = (as_object(config.get("quantization_config")) or {}).get("block_shape")
    if shape is not None and shape != _BLOCK_SHAPE:
        found.append(f"W_BLOCK_SHAPE: block_shape {shape!r} is not read; the tensors decide")
    if shards.spare:
        names = ", ".join(shards.spare[:3])
        found.append(f"W_EXTRA_FILE: the index does not name {names}; not loaded")
    return tuple(found)


def overruled(verdict: Verdict) -> tuple[str, ...]:
    """Return the warning on modules that are read as packed though a list excludes them, if any."""
    if not verdict.overruled:
        return ()
    names, count = ", ".join(verdict.overruled[:3]), len(verdict.overruled)
    found = f"{verdict.excluded_by} excludes {names} ({count} in all), which are packed"
    return (f"W_EXCLUDED_BUT_QUANTIZED: {found}; the tensors win, as model.lenient says",)
