"""The index of a checkpoint of many shards, parsed in less memory than JSON of its size takes.

An index names a tensor in every line: a mixture of 512 experts has 300,000. The parser of CPython
makes a new text of every file name and keeps a second table of all keys, which is more than four
times the file. A plain map that may be too much is read pair by pair instead, which takes less
memory and more time; whatever else there is, is parsed as ever.
"""

from __future__ import annotations

import re
from typing import Any, Final

from appliance.checkpoint.document import as_object, check_elements, parse_unique
from appliance.checkpoint.footprint import ROOM_BYTES, TIMES_THE_FILE, is_surely_light

KEY: Final = "weight_map"

_SPACE: Final = rb"[ \t\n\r]*+"
_TEXT: Final = rb'"([^"\\\x00-\x1f]*+)"'
_BEGIN = re.compile(rb'"weight_map"' + _SPACE + rb":" + _SPACE + rb"\{")
_PAIR = re.compile(_SPACE + _TEXT + _SPACE + rb":" + _SPACE + _TEXT + _SPACE + rb"(?:,|(\}))")
_PAIR_BYTES: Final = 130
"""A name's header, and its entry in a growing table; its letters come on top."""

_FILES_MAX: Final = 8192
_REST_MAX: Final = 16 * 1024


def parse_index(raw: bytes) -> object:
    """Return the value of an index, as `parse_unique` does and held to the same memory.

    Raises:
        ValueError: As `parse_unique`.
        RecursionError: As `parse_unique`.
    """
    check_elements(raw)
    table = None if is_surely_light(raw) else _plain(raw)
    return parse_unique(raw) if table is None else table


def _plain(raw: bytes) -> dict[str, Any] | None:
    """Return the object of an index whose map is plain, None if it is not or might take too much.

    Without a backslash every quotation mark begins or ends a string, so that what looks like the
    key of the map is one.
    """
    begin = _BEGIN.search(raw)
    if begin is None or b"\\" in raw or not raw.isascii():
        return None
    pairs = raw.count(b'"') // 4
    if 2 * len(raw) + pairs * _PAIR_BYTES > TIMES_THE_FILE * len(raw) + ROOM_BYTES // 2:
        return None
    found = _places(raw, begin.end())
    if found is None:
        return None
    places, end = found
    rest = raw[: begin.end()] + raw[end - 1 :]
    table = as_object(parse_unique(rest)) if len(rest) <= _REST_MAX else None
    if table is None or table.get(KEY) != {}:  # it is the key of another object inside
        return None
    table[KEY] = places
    return table


def _places(raw: bytes, at: int) -> tuple[dict[str, str], int] | None:
    """Return name to file and where the map ends; None if it is anything but texts, each once."""
    places: dict[str, str] = {}
    files: dict[str, str] = {}
    count = 0
    while (pair := _PAIR.match(raw, at)) is not None and len(files) <= _FILES_MAX:
        file = pair[2].decode()
        places[pair[1].decode()] = files.setdefault(file, file)
        at, count = pair.end(), count + 1
        if pair[3] is not None:
            return (places, at) if len(places) == count else None
    return None
