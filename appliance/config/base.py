"""What every section of the configuration shares: strictness, and text types with units."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema

from appliance.units import GIB, KIB, MIB, format_seconds, parse_bytes, parse_seconds

Auto = Literal["auto"]


class Section(BaseModel):
    """One mapping of the YAML file: frozen, strict, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True
    )


@dataclass(frozen=True)
class Written:
    """How a value is written in the file, for messages and for the reference page.

    Attributes:
        noun: What is expected, such as `a size with a unit`.
        kind: `size` and `duration` values have bounds that are shown with their unit.
    """

    noun: str
    kind: Literal["text", "size", "duration"] = "text"


SIZE = Written("a size with a unit (B, KiB, MiB, GiB, TiB)", "size")
DURATION = Written("a duration with a unit (ms, s, m, h, d)", "duration")


def _size(value: object) -> int:
    if isinstance(value, str):
        return parse_bytes(value)
    raise ValueError(SIZE.noun)


def _duration(value: object) -> float:
    if isinstance(value, str):
        return parse_seconds(value)
    raise ValueError(DURATION.noun)


def _date(value: object) -> date:
    if isinstance(value, str):
        return date.fromisoformat(value)
    if isinstance(value, date):
        return value
    raise ValueError("a date such as 2026-12-31")


def _whole(value: object) -> int:
    """Keep `true` and `16.0` out of a set of integers: both equal one of its members in Python."""
    if type(value) is int:
        return value
    raise ValueError("an integer")


def format_size(count: int) -> str:
    """Return the shortest exact spelling, so that a dumped configuration reads back equal."""
    for unit, step in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count and count % step == 0:
            return f"{count // step}{unit}"
    return f"{count}B"


Size = Annotated[
    int,
    BeforeValidator(_size),
    PlainSerializer(format_size, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^\d+(\.\d+)? ?(B|KiB|MiB|GiB|TiB)$"}),
    SIZE,
]
"""Bytes, written with a unit."""

Duration = Annotated[
    float,
    BeforeValidator(_duration),
    PlainSerializer(format_seconds, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^\d+(\.\d+)? ?(ms|s|m|h|d)$"}),
    DURATION,
]
"""Seconds, written with a unit."""

Day = Annotated[
    date,
    BeforeValidator(_date),
    WithJsonSchema({"type": "string", "format": "date"}),
    Written("a date such as 2026-12-31"),
]
"""A calendar day, written year-month-day; a bare number is no date."""

Whole = BeforeValidator(_whole)
"""Goes with a `Literal` of integers."""

ABSOLUTE_PATH = Written("an absolute path without control characters")
PATH_PATTERN = r"^/[^\x00-\x1f\x7f]*$"
"""Absolute: a relative path depends on the working directory, and vLLM takes a missing one for a
hub name."""
