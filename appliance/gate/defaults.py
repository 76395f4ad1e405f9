"""The gate's section as plain values, which is how plans and `healthchecks` carry it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel

from appliance.config.gate import GateSection

if TYPE_CHECKING:
    from collections.abc import Mapping


def plain_section(section: GateSection | None = None) -> Mapping[str, Any]:
    """Return the section with sizes in bytes and times in seconds; without one, its defaults."""
    return cast("Mapping[str, Any]", _plain(GateSection() if section is None else section))


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[object]", value)]
    return value
