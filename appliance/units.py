"""Sizes and durations: text with a unit on the outside, integers of bytes and seconds inside."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_SIZE_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024**4}
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST_NUMBER = 30
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(B|KiB|MiB|GiB|TiB)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(ms|s|m|h|d)")


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as `16GiB`.

    Raises:
        ValueError: If the text is not a number followed by B, KiB, MiB, GiB or TiB.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("a size with a unit (B, KiB, MiB, GiB, TiB) such as 16GiB")
    return round(_finite(match[1]) * _SIZE_UNITS[match[2]])


def parse_seconds(text: str) -> float:
    """Return the seconds of a duration such as `30s` or `1h`.

    Raises:
        ValueError: If the text is not a number followed by ms, s, m, h or d.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError("a duration with a unit (ms, s, m, h, d) such as 30s")
    return _finite(match[1]) * _DURATION_UNITS[match[2]]


def _finite(digits: str) -> float:
    """Hundreds of digits read as infinity, which no integer of bytes can be."""
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError(f"a number of at most {_LONGEST_NUMBER} digits with a unit")
    return float(digits)


def format_bytes(count: float) -> str:
    """Return a size for people: `9.31 GiB`, `512 B`; negative sizes keep their sign."""
    for unit, step in (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= step:
            return f"{count / step:.2f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a duration for people in its largest whole unit: `1h`, `90s`, `250ms`."""
    for unit in ("d", "h", "m", "s"):
        step = _DURATION_UNITS[unit]
        if seconds >= step and seconds % step == 0:
            return f"{seconds / step:.0f}{unit}"
    return f"{seconds:g}s" if seconds >= 1 else f"{seconds * 1000:.0f}ms"
