"""Opens GGUF files and looks their keys up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf

from appliance.checkpoint.document import is_named, is_regular
from appliance.checkpoint.faults import refuse
from appliance.checkpoint.gguf_scan import scan

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.errors import ApplianceError

LARGEST = 2**40

_FIX_PATH = "check the path or download the file again"


def open_file(source: Path) -> gguf.GGUFReader:
    """Open a GGUF file.

    Raises:
        ApplianceError: GGUF_UNREADABLE.
    """
    if is_named(source) and not is_regular(source):  # a pipe would be waited for
        raise refuse("GGUF_UNREADABLE", str(source), "a regular file", "something else", _FIX_PATH)
    scan(source)
    try:
        return gguf.GGUFReader(source)
    except (OSError, ValueError, IndexError, KeyError, TypeError, ArithmeticError) as error:
        raise refuse(
            "GGUF_UNREADABLE",
            str(source),
            "a GGUF file of version 2 or 3",
            f"{type(error).__name__}: {str(error)[:120]}",
            _FIX_PATH,
        ) from None


def field(source: Path, reader: gguf.GGUFReader, key: str) -> Any:  # noqa: ANN401 - GGUF's types
    """Return the value of a key.

    Raises:
        ApplianceError: GGUF_METADATA if it is not there.
    """
    if reader.get_field(key) is None:
        raise _wrong(source, key, "the key is there", "no such key")
    return optional(reader, key, None)


def optional(reader: gguf.GGUFReader, key: str, default: Any) -> Any:  # noqa: ANN401 - GGUF's types
    """Return the value of a key, the default if it is not there or cannot be read."""
    found = reader.get_field(key)
    if found is None:
        return default
    try:
        return found.contents()
    except (UnicodeDecodeError, IndexError, ValueError, TypeError):
        return default


def number(
    source: Path, reader: gguf.GGUFReader, key: str, default: float | None = None
) -> int | float:
    """Return a finite, positive or zero number.

    Raises:
        ApplianceError: GGUF_METADATA if it is missing without a default, or is anything else.
    """
    value: object = (
        field(source, reader, key) if default is None else optional(reader, key, default)
    )
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < LARGEST:
        raise _wrong(source, key, f"a number of 0 to {LARGEST}", repr(value)[:80])
    return value


def count(source: Path, reader: gguf.GGUFReader, key: str, default: int | None = None) -> int:
    """Return a positive integer; see `number`."""
    value = number(source, reader, key, default)
    if not isinstance(value, int) or value == 0:
        raise _wrong(source, key, "a positive integer", repr(value)[:80])
    return value


def items(source: Path, reader: gguf.GGUFReader, key: str) -> list[Any]:
    """Return a list.

    Raises:
        ApplianceError: GGUF_METADATA if it is missing or no list.
    """
    value: object = field(source, reader, key)
    if not isinstance(value, list):
        raise _wrong(source, key, "a list", type(value).__name__)
    found: list[Any] = value  # pyright: ignore[reportUnknownVariableType] - asked by the caller
    return found


def _wrong(source: Path, key: str, what: str, value: str) -> ApplianceError:
    fix = "use a file made by a current converter"
    return refuse("GGUF_METADATA", f"{source} {key}", what, value, fix)
