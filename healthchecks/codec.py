"""Frozen dataclasses to plain JSON values and back, for child processes and recorded states."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")

Plain = Any
"""What json.loads gives, and the annotations it is compared with."""


def to_plain(value: Plain) -> Plain:
    """Return dicts, lists, strings, numbers, booleans and None for a value of facts."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        members = typing.cast("Mapping[str, Plain]", value)
        return {key: to_plain(member) for key, member in members.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(member) for member in typing.cast("list[Plain]", value)]
    return value


def check_whole(kind: Plain, plain: Plain, where: str = "") -> None:
    """Check that a plain value holds every field of `kind` and of its parts, and no other.

    Raises:
        TypeError: If one is missing or more, with its path.
    """
    origin: Plain = typing.get_origin(kind)
    inner = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if plain is not None:
            check_whole(next(each for each in inner if each is not type(None)), plain, where)
    elif is_dataclass(kind) and isinstance(kind, type) and isinstance(plain, Mapping):
        parts = typing.cast("Mapping[str, Plain]", plain)
        hints, prefix = typing.get_type_hints(kind), f"{where}." if where else ""
        for name in sorted(hints.keys() ^ parts.keys()):
            raise TypeError(f"{prefix}{name} is {'missing' if name in hints else 'no part of it'}")
        for name, member in parts.items():
            check_whole(hints[name], member, f"{prefix}{name}")
    elif origin is tuple and isinstance(plain, list):
        members: list[Plain] = typing.cast("Plain", plain)
        for number, member in enumerate(members):
            check_whole(inner[0], member, f"{where}[{number}]")


def from_plain(kind: type[T], plain: Mapping[str, Any]) -> T:
    """Build `kind` of the mapping that `to_plain` made of it; keys it does not know are dropped.

    Raises:
        TypeError: If a value does not have the type of its field.
    """
    hints = typing.get_type_hints(kind)
    return kind(
        **{key: _value(hints[key], item, key) for key, item in plain.items() if key in hints}
    )


def _value(hint: Plain, value: Plain, where: str) -> Plain:
    origin: Plain = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _union(typing.get_args(hint), value, where)
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        return from_plain(hint, typing.cast("Mapping[str, Any]", value))
    if origin is tuple and isinstance(value, list):
        return _tuple(typing.get_args(hint), typing.cast("Plain", value), where)
    if origin is Mapping and isinstance(value, Mapping):
        inner = typing.get_args(hint)[1]
        items = typing.cast("Mapping[str, Any]", value)
        return {key: _value(inner, item, where) for key, item in items.items()}
    return _scalar(hint, value, where)


def _union(choices: tuple[Plain, ...], value: Plain, where: str) -> Plain:
    if value is None:
        if type(None) in choices:
            return None
        raise TypeError(f"{where}: a value is needed")
    inner = [choice for choice in choices if choice is not type(None)]
    return _value(inner[0], value, where)


def _tuple(inner: tuple[Plain, ...], items: list[Any], where: str) -> tuple[Plain, ...]:
    if inner[-1] is Ellipsis:
        return tuple(_value(inner[0], item, where) for item in items)
    if len(inner) != len(items):
        raise TypeError(f"{where}: {len(inner)} values are needed, got {len(items)}")
    return tuple(_value(kind, item, where) for kind, item in zip(inner, items, strict=True))


def _scalar(hint: Plain, value: Plain, where: str) -> Plain:
    wanted: tuple[type, ...] = (int, float) if hint is float else (hint,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool):
        raise TypeError(f"{where}: {hint.__name__} is needed, got {type(value).__name__}")
    return value
