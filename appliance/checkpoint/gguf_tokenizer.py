"""Rebuilds the byte-level BPE tokenizer that a GGUF file carries."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from appliance.checkpoint.faults import refuse
from appliance.checkpoint.gguf_fields import count, field, items, optional
from appliance.checkpoint.writer import write_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import gguf

    from appliance.errors import ApplianceError

_CONTROL_TOKEN = 3
_USER_TOKEN = 4

# Whether the tokenizer splits numbers into single digits before the byte-level rule.
_SINGLE_DIGITS: Mapping[str, bool] = {"smollm": True, "gpt-2": False}


def build_tokenizer(source: Path, reader: gguf.GGUFReader) -> Tokenizer:
    """Rebuild the byte-level BPE tokenizer of the file.

    Raises:
        ApplianceError: GGUF_TOKENIZER or GGUF_METADATA.
    """
    model = str(field(source, reader, "tokenizer.ggml.model"))
    rule = str(optional(reader, "tokenizer.ggml.pre", "default"))
    if model != "gpt2" or rule not in _SINGLE_DIGITS:
        raise refuse(
            "GGUF_TOKENIZER",
            f"{source} tokenizer.ggml.model, tokenizer.ggml.pre",
            f"a gpt2 tokenizer with the rule {' or '.join(_SINGLE_DIGITS)}",
            f"{model}, {rule}",
            "start from the model's safetensors checkpoint instead",
        )
    tokens = [str(token) for token in items(source, reader, "tokenizer.ggml.tokens")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(source, reader, vocabulary)))
    prefix = bool(optional(reader, "tokenizer.ggml.add_space_prefix", False))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if _SINGLE_DIGITS[rule] else []
    built.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    built.decoder = decoders.ByteLevel()
    kinds = items(source, reader, "tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        what = f"a type for each of {len(tokens)} tokens"
        raise _broken(source, "tokenizer.ggml.token_type", what, str(len(kinds)))
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in {_CONTROL_TOKEN, _USER_TOKEN}:
            added = AddedToken(token, special=kind == _CONTROL_TOKEN, normalized=False)
            # The package's stubs leave the element type of the list open.
            built.add_tokens([added])  # pyright: ignore[reportUnknownMemberType]
    return built


def _merges(
    source: Path, reader: gguf.GGUFReader, vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Return the merges; the library ends the process on one that leads out of the vocabulary."""
    pairs: list[tuple[str, str]] = []
    for merge in items(source, reader, "tokenizer.ggml.merges"):
        left, _, right = str(merge).partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            what = "merges of tokens into a token"
            raise _broken(source, "tokenizer.ggml.merges", what, repr(merge)[:80])
        pairs.append((left, right))
    return pairs


def _broken(source: Path, key: str, what: str, value: str) -> ApplianceError:
    fix = "use a file made by a current converter"
    return refuse("GGUF_TOKENIZER", f"{source} {key}", what, value, fix)


def write_tokenizer(
    directory: Path, tokenizer: Tokenizer, source: Path, reader: gguf.GGUFReader
) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Raises:
        ApplianceError: GGUF_TOKENIZER if a special token is none of the vocabulary.
    """
    tokens = items(source, reader, "tokenizer.ggml.tokens")

    def token(role: str) -> str | None:
        index = optional(reader, f"tokenizer.ggml.{role}_token_id", None)
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            what = f"an id below {len(tokens)}"
            raise _broken(source, f"tokenizer.ggml.{role}_token_id", what, repr(index)[:80])
        return str(tokens[index])

    config = {
        "add_bos_token": bool(optional(reader, "tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": bool(optional(reader, "tokenizer.ggml.add_space_prefix", False)),
        "bos_token": token("bos"),
        "chat_template": optional(reader, "tokenizer.chat_template", None),
        "clean_up_tokenization_spaces": False,
        "eos_token": token("eos"),
        "model_max_length": count(source, reader, "llama.context_length"),
        "pad_token": token("padding"),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": token("unknown"),
    }
    kept = {key: value for key, value in config.items() if value is not None}
    write_json(directory / "tokenizer.json", json.loads(tokenizer.to_str()))
    write_json(directory / "tokenizer_config.json", kept)
