"""What the schema expects at a key, in words: for messages and for the reference page."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from appliance.config.base import Written, format_size
from appliance.config.schema import Config
from appliance.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True)
class Entry:
    """One key of the schema.

    Attributes:
        key: Dotted key; an item of a list is written `overrides[]`.
        expected: What may stand there.
        default: The default as the file spells it, None for a required key.
        meaning: The key's description.
        section: It holds further keys.
    """

    key: str
    expected: str
    default: str | None
    meaning: str
    section: bool


def entries(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[Entry]:
    """Yield every key of the schema in the order of the file, a section before its keys."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        inner, suffix = _nested(field.annotation)
        yield Entry(
            key=key,
            expected=expected(field.annotation, field.metadata),
            default=None if field.is_required() else _default(field),
            meaning=field.description or "",
            section=inner is not None,
        )
        if inner is not None:
            yield from entries(inner, f"{key}{suffix}.")


@functools.cache
def every_entry() -> tuple[Entry, ...]:
    """Return `entries` of the whole schema; made once, a file may have thousands of faults."""
    return tuple(entries())


@functools.cache
def _defaults() -> dict[str, str | None]:
    return {entry.key: entry.default for entry in every_entry()}


def allowed_keys(path: str) -> tuple[str, ...] | None:
    """Return the keys a mapping at `path` may have; None if any key is allowed or none is known."""
    annotation, _ = _find(path)
    inner, _ = _nested(annotation)
    return None if inner is None else tuple(inner.model_fields)


def expected_at(path: str) -> str:
    """Return in words what may stand at `path`."""
    annotation, metadata = _find(path)
    return expected(annotation, metadata)


def default_at(path: str) -> str | None:
    """Return the default of `path` as the file spells it, None where there is none."""
    return _defaults().get(re.sub(r"\[\d+\]", "[]", path))


def expected(annotation: object, metadata: Sequence[object] = ()) -> str:
    """Return in words what an annotation accepts: `auto` or an integer from 16 to 4096."""
    *others, last = _alternatives(annotation, tuple(metadata))
    return f"{', '.join(others)} or {last}" if others else last


def _alternatives(annotation: object, metadata: tuple[object, ...]) -> list[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    section, _ = _nested(annotation)
    if origin is Annotated:
        words = _alternatives(arguments[0], (*arguments[1:], *metadata))
    elif origin in (Union, UnionType):
        words = [word for argument in arguments for word in _alternatives(argument, metadata)]
    elif origin is Literal:
        words = [f"`{value}`" for value in arguments]
    elif origin is list:
        words = [f"a list (each {expected(arguments[0])})"]
    elif origin is dict:
        words = [f"a mapping (each value {expected(arguments[1])})"]
    elif annotation is NoneType:
        words = ["`null`"]
    elif annotation is bool:
        words = ["`true`", "`false`"]
    elif section is not None:
        words = [f"a mapping with the keys {', '.join(section.model_fields)}"]
    else:
        words = [_scalar(annotation, list(_flat(metadata)))]
    return words


def _scalar(annotation: object, metadata: list[object]) -> str:
    written = next((item for item in metadata if isinstance(item, Written)), None)
    nouns: dict[object, str] = {int: "an integer", float: "a number"}
    noun = written.noun if written else nouns.get(annotation, "text")
    low = next((_bound(m.ge, written) for m in metadata if isinstance(m, Ge)), None)
    above = next((_bound(m.gt, written) for m in metadata if isinstance(m, Gt)), None)
    high = next((_bound(m.le, written) for m in metadata if isinstance(m, Le)), None)
    shortest = next((m.min_length for m in metadata if isinstance(m, MinLen)), 0)
    if noun == "text" and shortest:
        return f"text of at least {shortest} characters" if shortest > 1 else "text, not empty"
    if above is not None:
        return f"{noun} above {above}" + (f" and up to {high}" if high else "")
    if low is not None:
        return f"{noun} from {low} to {high}" if high else f"{noun} of at least {low}"
    return noun


def _bound(bound: object, written: Written | None) -> str:
    """Return a bound or a default as the file would spell it."""
    if not isinstance(bound, (int, float)):
        return str(bound)
    if written and written.kind == "size":
        return format_size(int(bound))
    if written and written.kind == "duration":
        return format_seconds(bound)
    return f"{bound:.15g}"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, dict)):
        return "[]" if isinstance(value, list) else "{}"
    written = [item for item in _flat(tuple(field.metadata)) if isinstance(item, Written)]
    return "" if isinstance(value, BaseModel) else _bound(value, written[0] if written else None)


def _flat(metadata: tuple[object, ...]) -> Iterator[object]:
    """Yield the constraints of nested `Field(...)` beside the plain ones."""
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _flat(tuple(item.metadata))
        else:
            yield item


def _nested(annotation: object) -> tuple[type[BaseModel] | None, str]:
    """Return the section an annotation holds, and `[]` where a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    if get_origin(annotation) is list:
        inner, suffix = _nested(get_args(annotation)[0])
        return inner, f"[]{suffix}" if inner else ""
    return None, ""


def _find(path: str) -> tuple[Any, list[Any]]:
    """Return annotation and constraints at a dotted path; `object` beyond the schema."""
    annotation: Any = Config
    metadata: list[Any] = []
    for part in re.findall(r"[^.\[\]]+|\[\d+\]", path):
        inner, _ = _nested(annotation)
        if get_origin(annotation) is dict:
            annotation, metadata = get_args(annotation)[1], []
        elif part.startswith("["):
            annotation = get_args(annotation)[0] if get_origin(annotation) is list else object
            metadata = []
        elif inner is not None and part in inner.model_fields:
            field = inner.model_fields[part]
            annotation, metadata = field.annotation, list(field.metadata)
        else:
            return object, []
    return annotation, metadata
