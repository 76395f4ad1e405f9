"""`config.json` and its neighbours: typed access, with the file and key in every complaint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from appliance.checkpoint.document import as_list, as_object, as_texts, is_named, read_document
from appliance.checkpoint.faults import refuse

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.errors import ApplianceError

NESTED = ("text_config", "llm_config")
"""Where multimodal checkpoints keep the language model's fields."""

_FIX = "repair the checkpoint's config.json, or fetch it again"
_FACTOR_MAX = 1024
_CONTEXT_MAX = 2**40
LAYERS_MAX = 10_000
EXPERTS_MAX = 65_536


@dataclass(frozen=True)
class ModelConfig:
    """`config.json`; a field is looked up in the language model's part first, then at the top.

    Attributes:
        path: The file.
        top: The whole document.
        text: The language model's part; the document itself where nothing is nested.
    """

    path: Path
    top: dict[str, Any]
    text: dict[str, Any]

    @property
    def architecture(self) -> str:
        """First entry of `architectures`."""
        names = as_texts(self.top.get("architectures"))
        if not names:
            value = repr(self.top.get("architectures"))
            raise refuse("E_CONFIG", f"{self.path} architectures", "a list of names", value, _FIX)
        return names[0]

    def get(self, key: str) -> object:
        """Return a field's value, None if neither part has it."""
        value = self.text.get(key)
        return self.top.get(key) if value is None else value

    def integer(self, key: str, default: int | None = None, largest: int = 2**40) -> int:
        """Return a positive integer of at most `largest`.

        Raises:
            ApplianceError: Exit 30 if it is missing without a default, or is anything else.
        """
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value <= largest:
            what, found = f"an integer of 1 to {largest}", repr(value)[:80]
            raise refuse("E_CONFIG", f"{self.path} {key}", what, found, _FIX)
        return value

    def count(self, key: str) -> int:
        """Return an integer that may be 0 or absent."""
        return 0 if self.get(key) in (None, 0) else self.integer(key)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean.

        Raises:
            ApplianceError: Exit 30 if it is there and not a boolean.
        """
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise refuse("E_CONFIG", f"{self.path} {key}", "true or false", repr(value), _FIX)
        return value

    def integers(self, key: str) -> list[int]:
        """Return a list of integers, empty if absent."""
        items = as_list(self.get(key)) or []
        return [item for item in items if type(item) is int]

    def texts(self, key: str) -> list[str]:
        """Return a list of texts, empty if absent."""
        return as_texts(self.get(key)) or []

    def context_limit(self, default: int) -> int:
        """Return the model's longest context in tokens, rope scaling and tokenizer counted in.

        Raises:
            ApplianceError: Exit 30 if rope scaling has a factor or an original length that cannot
                be, or leaves no token.
        """
        limit: float = self.integer("max_position_embeddings", default)
        tokenizer = self.path.parent / "tokenizer_config.json"
        if is_named(tokenizer):
            longest = read_document(tokenizer).get("model_max_length")
            if _is_number(longest) and longest >= 1:
                limit = min(limit, longest)
        rope = as_object(self.get("rope_parameters")) or as_object(self.get("rope_scaling")) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        factor = rope.get("factor")
        if kind in ("su", "longrope", "llama3", "mrope") or factor is None:
            return int(limit)
        if not _is_number(factor) or not 0 < factor <= _FACTOR_MAX:
            raise self._rope("factor", f"a number of 0 to {_FACTOR_MAX}", factor)
        original = rope.get("original_max_position_embeddings")
        if kind == "yarn" and original is not None:
            if type(original) is not int or not 0 < original <= _CONTEXT_MAX:
                what = f"an integer of 1 to {_CONTEXT_MAX}"
                raise self._rope("original_max_position_embeddings", what, original)
            limit = original
        if int(limit * factor) < 1:
            raise self._rope("factor", f"one that leaves some of {limit} tokens", factor)
        return int(limit * factor)

    def _rope(self, key: str, what: str, value: object) -> ApplianceError:
        return refuse("E_CONFIG", f"{self.path} rope {key}", what, repr(value)[:80], _FIX)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read_config(root: Path) -> ModelConfig:
    """Read `config.json` of a checkpoint directory.

    Raises:
        ApplianceError: Exit 30 if it is missing or malformed.
    """
    path = root / "config.json"
    top = read_document(path)
    nested = next((part for key in NESTED if (part := as_object(top.get(key)))), None)
    return ModelConfig(path, top, top if nested is None else nested)
