"""Builds frozen dataclasses of plain values from JSON, refusing whatever is not exactly that."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

Plain = Any
"""What `json.loads` gives, and the annotations it is held against."""


class DecodeError(ValueError):
    """The text is JSON of another shape.

    Attributes:
        where: Path of the value, such as `memory.ranks[0].items`.
        what: What was expected there.
        value: What was found.
    """

    def __init__(self, where: str, what: str, value: str) -> None:
        """Keep the parts of the later one-line message."""
        super().__init__(f"{where}: {what}, got {value}")
        self.where = where
        self.what = what
        self.value = value


def decode(kind: Plain, value: Plain, where: str = "") -> Plain:
    """Return the value as the given type.

    Args:
        kind: A frozen dataclass, `Literal`, union, tuple, `Mapping`, plain type or `Any`.
        value: What `json.loads` gave.
        where: Path of the value, for messages.

    Raises:
        DecodeError: If the value is not exactly of that type; an integer may stand for a float.
    """
    origin: Plain = get_origin(kind)
    arguments = get_args(kind)
    if origin is Literal:
        return _literal(arguments, value, where)
    if origin in (Union, types.UnionType):
        return _union(arguments, value, where)
    if origin is tuple:
        return _tuple(arguments, value, where)
    if origin is Mapping:
        items = _object(value, where).items()
        return {name: decode(arguments[1], item, f"{where}.{name}") for name, item in items}
    if kind is Plain:
        return value
    build = _dataclass if dataclasses.is_dataclass(kind) else _plain
    return build(kind, value, where)


def _dataclass(kind: Plain, value: Plain, where: str) -> Plain:
    table = _object(value, where)
    hints = get_type_hints(kind)
    known = {field.name: field for field in dataclasses.fields(kind)}
    for name in table:
        if name not in known:
            raise DecodeError(f"{where}.{name}".lstrip("."), f"one of {', '.join(known)}", name)
    built: dict[str, Plain] = {}
    for name, field in known.items():
        place = f"{where}.{name}".lstrip(".")
        if name in table:
            built[name] = decode(hints[name], table[name], place)
        elif field.default is dataclasses.MISSING:
            raise DecodeError(place, "a value", "none")
    return kind(**built)


def _literal(allowed: tuple[Plain, ...], value: Plain, where: str) -> Plain:
    for item in allowed:
        if type(item) is type(value) and item == value:
            return item
    raise DecodeError(where, f"one of {', '.join(map(repr, allowed))}", repr(value)[:80])


def _union(kinds: tuple[Plain, ...], value: Plain, where: str) -> Plain:
    for kind in kinds:
        try:
            return decode(kind, value, where)
        except DecodeError:
            continue
    names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise DecodeError(where, names, repr(value)[:80])


def _tuple(kinds: tuple[Plain, ...], value: Plain, where: str) -> tuple[Plain, ...]:
    if not isinstance(value, list):
        raise DecodeError(where, "a list", repr(value)[:80])
    items: list[Plain] = cast("Plain", value)
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(items)
    if len(kinds) != len(items):
        raise DecodeError(where, f"{len(kinds)} items", str(len(items)))
    pairs = zip(kinds, items, strict=True)
    return tuple(decode(kind, item, f"{where}[{at}]") for at, (kind, item) in enumerate(pairs))


def _object(value: Plain, where: str) -> dict[str, Plain]:
    if not isinstance(value, dict):
        raise DecodeError(where or "the plan", "an object", repr(value)[:80])
    return cast("dict[str, Plain]", value)


def _plain(kind: Plain, value: Plain, where: str) -> Plain:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is kind:
        return value
    raise DecodeError(where, kind.__name__, repr(value)[:80])
