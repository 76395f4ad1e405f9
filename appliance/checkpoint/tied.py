"""Holds a head against the embedding that config.json says it shares; standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.checkpoint.faults import refuse
from appliance.checkpoint.patterns import TEXT_PREFIXES

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.checkpoint.config import ModelConfig
    from appliance.checkpoint.header import StoredTensor
    from appliance.checkpoint.shards import Shards

_CHUNK = 1 << 22
_HEADS = ("lm_head.weight", *(f"{prefix}lm_head.weight" for prefix in TEXT_PREFIXES))
_EMBEDDINGS = (
    "embed_tokens.weight",
    *(f"{prefix}embed_tokens.weight" for prefix in TEXT_PREFIXES),
)


def check_tied(config: ModelConfig, shards: Shards) -> None:
    """Refuse a checkpoint whose head differs from the embedding that it is tied to.

    The engine would serve the embedding and never say that another head was there.

    Raises:
        ApplianceError: E_CONFIG_TENSOR_MISMATCH, E_UNREADABLE or E_TRUNCATED.
    """
    if not config.flag("tie_word_embeddings"):
        return
    located = shards.locate()
    head = next((name for name in _HEADS if name in located), None)
    embedding = next((name for name in _EMBEDDINGS if name in located), None)
    if head is None or embedding is None:
        return
    (file, one), (other_file, other) = located[head], located[embedding]
    if (one.dtype, one.shape) == (other.dtype, other.shape) and _same(
        shards.root / file, one, shards.root / other_file, other
    ):
        return
    what = f"the values of {embedding} in {other_file} ({config.path} tie_word_embeddings true)"
    value, fix = f"others in {file}", "repair tie_word_embeddings, or remove the tensor"
    raise refuse("E_CONFIG_TENSOR_MISMATCH", head, what, value, fix)


def _same(path: Path, one: StoredTensor, other_path: Path, other: StoredTensor) -> bool:
    try:
        with path.open("rb") as first, other_path.open("rb") as second:
            first.seek(one.begin)
            second.seek(other.begin)
            for at in range(0, one.end - one.begin, _CHUNK):
                length = min(_CHUNK, one.end - one.begin - at)
                if first.read(length) != second.read(length):
                    return False
    except OSError as error:
        value, fix = error.strerror or type(error).__name__, "fetch the file again"
        raise refuse("E_UNREADABLE", str(path), "a readable shard", value, fix) from None
    return True
