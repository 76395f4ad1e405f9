"""JSON files of a checkpoint: regular, bounded, and always an object."""

from __future__ import annotations

import json
import os
import re
import stat
from typing import TYPE_CHECKING, Any, cast

from appliance.checkpoint.faults import refuse
from appliance.checkpoint.footprint import STRING, Sharer, require_footprint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DOCUMENT_BYTES_MAX = 64 * 1024**2
"""An index of 300,000 tensors has 30 MB; a tokenizer is never read here."""

ELEMENTS_MAX = 2_000_000
"""A header of 100,000 tensors has 800,000 elements, an index of 300,000 as many."""

_SMALL = 1024**2

_STRING = re.compile(STRING.decode(), re.DOTALL)


def read_document(path: Path, parse: Callable[[bytes], object] | None = None) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        path: The file.
        parse: Makes the value of its bytes, `parse_unique` if not given.

    Raises:
        ApplianceError: Exit 30 if the file is missing, unreadable, too large, not JSON or not an
            object.
    """
    where, fix = str(path), "fetch the file again"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for, a device never ends
            raise refuse("E_UNREADABLE", where, "a regular file", "something else", fix)
        if status.st_size > DOCUMENT_BYTES_MAX:
            size = f"{status.st_size} bytes"
            raise refuse("E_CONFIG", where, f"at most {DOCUMENT_BYTES_MAX} bytes", size, fix)
        content = (parse or parse_unique)(path.read_bytes())
    except FileNotFoundError:
        raise refuse("E_CONFIG", where, "the file", "nothing there", fix) from None
    except OSError as error:
        value = error.strerror or type(error).__name__
        fix = "make it readable for the user that serves"
        raise refuse("E_UNREADABLE", where, "a readable file", value, fix) from None
    except (ValueError, RecursionError) as error:
        value = f"{type(error).__name__}: {str(error)[:120]}"
        raise refuse("E_CONFIG", where, "a JSON object", value, fix) from None
    table = as_object(content)
    if table is None:
        raise refuse("E_CONFIG", where, "a JSON object", type(content).__name__, fix)
    return table


def load_own(path: Path) -> dict[str, Any] | None:
    """Return the object in a file that a run of ours left, None if it is gone or damaged."""
    try:
        return as_object(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return None


def parse_unique(
    raw: bytes, *, is_bounded: bool = True, file_bytes: int = 0, object_bytes: int = 0
) -> object:
    """Return the value in JSON text; a key that occurs twice is an error, not the last one's.

    Small objects that are alike are one object, so the value must not be changed in place.

    Args:
        raw: The text; a caller that keeps no hold of it gets its memory back while it is parsed.
        is_bounded: Refuse text whose values would take more than four times its bytes and 8 MiB;
            a tokenizer is such, and is read in a child.
        file_bytes: Bytes of the file, if it has more than the text, which then counts as kept.
        object_bytes: What the caller makes of each JSON object, in bytes.

    Raises:
        ValueError: If it is no UTF-8, no JSON, takes too much memory, or repeats a key.
        RecursionError: If it is nested beyond reason.
    """
    if is_bounded:
        check_elements(raw)
        size, is_kept = file_bytes or len(raw), file_bytes > 0
        require_footprint(raw, size, is_kept=is_kept, object_bytes=object_bytes, is_shared=True)
    colons = raw.count(b":")
    text = raw.decode("utf-8")
    del raw
    value: object = json.loads(text, object_hook=Sharer())
    # An object built of pairs would show a repeated key at once, and take half as much again.
    if _keys(value) != colons:
        require_unique(text, value)
    return value


def require_unique(text: str, value: object) -> None:
    """Refuse the value of a JSON text with an object that has a key twice.

    Raises:
        ValueError: Naming the key, if the text is small enough to be parsed once more for it.
    """
    if _keys(value) == _colons(text):
        return
    if len(text) <= _SMALL:
        json.loads(text, object_pairs_hook=_unique)
    raise ValueError("a key occurs twice")


def _keys(value: object) -> int:
    """Count the keys of all objects in a value, holding no more of it than one way down."""
    count, way = 0, [iter([value])]
    while way:
        for each in way[-1]:
            if isinstance(each, dict):
                table = cast("dict[str, object]", each)
                count += len(table)
                way.append(iter(table.values()))
                break
            if isinstance(each, list):
                way.append(iter(cast("list[object]", each)))
                break
        else:
            way.pop()
    return count


def _colons(text: str) -> int:
    """Count the colons outside of strings: as many as the text has keys."""
    return text.count(":") - sum(match[0].count(":") for match in _STRING.finditer(text))


def check_elements(raw: bytes) -> None:
    """Refuse JSON of so many elements that parsing them would take minutes.

    Raises:
        ValueError: If there are more than `ELEMENTS_MAX`.
    """
    if len(raw) > ELEMENTS_MAX:
        elements = raw.count(b",") + raw.count(b"{") + raw.count(b"[")
        if elements > ELEMENTS_MAX:
            raise ValueError(f"{elements} elements in {len(raw)} bytes")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key[:80]!r} occurs twice")
            seen.add(key)
    return table


def is_named(path: Path) -> bool:
    """Tell whether a directory has the name, be it a lost link; unlike `exists`, never raises.

    A link into a directory that the user may not enter is the usual case where `exists` does.
    """
    return os.path.lexists(path)


def is_regular(path: Path) -> bool:
    """Tell whether a regular file can be found at a path; unlike `is_file`, never raises."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def is_directory(path: Path) -> bool:
    """Tell whether a directory can be found at a path; unlike `is_dir`, never raises."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return False


def as_object(value: object) -> dict[str, Any] | None:
    """Return the value if it is a JSON object, else None."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def as_list(value: object) -> list[Any] | None:
    """Return the value if it is a JSON list, else None."""
    if not isinstance(value, list):
        return None
    items: list[Any] = value  # pyright: ignore[reportUnknownVariableType] - asked by the caller
    return items


def as_texts(value: object) -> list[str] | None:
    """Return the value if it is a JSON list of texts, else None."""
    items = as_list(value)
    if items is None or not all(isinstance(item, str) for item in items):
        return None
    return items
