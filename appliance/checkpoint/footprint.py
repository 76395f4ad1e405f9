"""How much memory JSON text takes once it is parsed, told from the text before that.

A list of two bytes takes ninety of memory, so a file's size says little. `require_footprint` adds
up what the parser of CPython would allocate and refuses text that goes beyond four times the file:
first by counting bytes, which is quick and errs high, then token by token where that is too much.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

TIMES_THE_FILE: Final = 4
ROOM_BYTES: Final = 8 * 1024**2
"""Memory that any file may take; the largest sound config.json is far smaller."""

STRING: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'
"""A string of JSON, or one that never ends; possessive, so that no text makes it slow."""

# Bytes of CPython 3.11 on 64 bits, each rounded up to the 16 that its allocator deals in.
_STRING: Final = 64  # header and terminator; the letters come on top
_NUMBER: Final = 32
_SHARED_DIGITS: Final = 2  # the interpreter has one object for each small number
_LIST, _LIST_SLOTS = 64, 32
_DICT, _DICT_SLOTS = 64, 128
_KEY: Final = 66  # entry and index of a growing table, and the table that it has just left
_ITEM: Final = 18  # the same for lists
_SMALL_TABLE: Final = 5
_SHARED, _SHARED_PAIR = 176, 160  # what `Sharer` keeps of an object: entry, tuple, and its pairs
_MOST_A_BYTE: Final = 128  # a list in a list in a list

_TOKEN = re.compile(rb"(?s)(" + STRING + rb")(\s*+:)?|[\[\]{},]|[0-9+-][0-9eE.+-]*+")
_FOUR_BYTES = re.compile(rb"[\xf0-\xff]")
_SHARED_MAX: Final = 256
_SHARED_PAIRS_MAX: Final = 16
_SHARED_MOST: Final = _SHARED + _SHARED_PAIR * _SHARED_PAIRS_MAX

_TWO_HALVES = re.compile(rb"\\u[dD][89abAB]")


class Sharer:
    """Hook of the JSON parser: small objects that are alike become one object.

    A list of quantized modules repeats a handful of schemes a hundred thousand times, and each
    would take five times its text. Whoever parses with it must not change what it gets.
    """

    def __init__(self) -> None:
        """Know no object yet."""
        self._known: dict[tuple[object, ...], dict[str, object]] = {}

    def __call__(self, table: dict[str, object]) -> dict[str, object]:
        """Return an earlier object of the same keys and scalars in their order, or this one."""
        if len(table) > _SHARED_PAIRS_MAX:
            return table
        key: list[object] = []
        for name, value in table.items():
            if isinstance(value, (dict, list)):
                return table
            # Numbers of two types, and the two zeros of floats, are equal and not the same.
            kind: type[object] = type(value)
            key.append((name, kind, repr(value) if kind is float else value))
        if len(self._known) < _SHARED_MAX:
            return self._known.setdefault(tuple(key), table)
        return self._known.get(tuple(key), table)


def require_footprint(
    raw: bytes,
    file_bytes: int,
    *,
    is_kept: bool = False,
    object_bytes: int = 0,
    is_shared: bool = False,
) -> None:
    """Refuse JSON text whose values would take more than four times the file and 8 MiB.

    Args:
        raw: The text.
        file_bytes: Bytes of the whole file that the text is of.
        is_kept: The text stays in memory beside its values.
        object_bytes: What the caller makes of each JSON object, in bytes.
        is_shared: It is parsed with a `Sharer`.

    Raises:
        ValueError: Naming the bytes.
    """
    limit = TIMES_THE_FILE * file_bytes + ROOM_BYTES
    if len(raw) * (_MOST_A_BYTE + object_bytes) < limit:  # such as every header of a real shard
        return
    width = _width(raw)
    text = len(raw) * (width + is_kept)
    # While decoding there are the bytes, the text, and the narrower text that it grew out of.
    decoding = len(raw) * {1: 2, 2: 4, 4: 7}[width]
    objects = raw.count(b"{")
    room = limit - text - object_bytes * objects
    kept = min(objects, _SHARED_MAX) * _SHARED_MOST if is_shared else 0
    if decoding > limit or (
        _counted(raw) + kept > room and _added_up(raw, room, is_shared=is_shared) > room
    ):
        raise ValueError(f"values that take more than {limit} bytes of memory")


def is_surely_light(raw: bytes) -> bool:
    """Tell whether text of a file of its own passes `require_footprint` by the quick count."""
    limit = TIMES_THE_FILE * len(raw) + ROOM_BYTES
    return _counted(raw) + len(raw) * _width(raw) <= limit


def _width(text: bytes) -> int:
    """Return the bytes that a letter takes once the text is decoded, escapes left as they are."""
    if text.isascii():
        return 1
    return 4 if _FOUR_BYTES.search(text) else 2


def _counted(raw: bytes) -> int:
    """Return an upper bound of what the values take, from counts of bytes alone.

    Marks inside strings count as if they had a meaning, which only makes the bound larger.
    """
    objects, lists = raw.count(b"{"), raw.count(b"[")
    keys, commas, quotes = raw.count(b":"), raw.count(b","), raw.count(b'"')
    has_escapes = b"\\" in raw
    items = max(0, commas + objects + lists - keys)
    strings = -(-quotes // 2)
    scalars = items + keys if has_escapes else max(0, items + 2 * keys - strings)
    return (
        objects * _DICT
        + min(objects, keys) * _DICT_SLOTS
        + 2 * keys * _KEY  # the object's own table, and the parser's table of all keys
        + lists * (_LIST + _LIST_SLOTS)
        + items * _ITEM
        + strings * _STRING
        + scalars * _NUMBER
        + len(raw) * _letters(raw)
    )


def _letters(string: bytes) -> int:
    """Return the bytes that a letter may take, and twice that where a string is pieced together."""
    has_escapes = b"\\" in string
    width = _width(string)
    if has_escapes and b"\\u" in string:
        width = 4 if _TWO_HALVES.search(string) else max(2, width)
    return width * (2 if has_escapes else 1)


@dataclass
class _Sum:
    """What the tokens so far add up to.

    Attributes:
        total: Bytes.
        keys: Hashes of the keys so far: the parser keeps each once.
        counts: Commas of the containers that are open, and whether they are objects.
        begun: Where the object that was opened last begins, None once a container is closed.
        before: The total at that place.
        shared: Hashes of the texts of objects that `Sharer` keeps; None without one.
    """

    total: int = 0
    keys: set[int] = field(default_factory=set)
    counts: list[tuple[int, bool]] = field(default_factory=list)
    commas: int = 0
    is_object: bool = False
    begun: int | None = None
    before: int = 0
    shared: set[int] | None = None

    def open(self, at: int, *, is_object: bool) -> None:
        self.begun, self.before = at if is_object else None, self.total
        self.counts.append((self.commas, self.is_object))
        self.commas, self.is_object = 0, is_object
        self.total += _DICT + _DICT_SLOTS if is_object else _LIST + _LIST_SLOTS

    def close(self, raw: bytes, end: int) -> None:
        count = self.commas + 1
        if self.is_object:
            self.total += _KEY * count if count > _SMALL_TABLE else 0
            self._share(raw, end, count)
        else:
            self.total += _ITEM * count
        self.begun = None
        if self.counts:
            self.commas, self.is_object = self.counts.pop()

    def _share(self, raw: bytes, end: int, pairs: int) -> None:
        """Take back what a closed object of scalars took, if its very text was there before.

        Every such text is counted as one that `Sharer` knows: an object of more pairs may be one
        of fewer, with a key many times.
        """
        if self.shared is None or self.begun is None:
            return
        known = hash(raw[self.begun : end])
        if known in self.shared:
            if pairs <= _SHARED_PAIRS_MAX:
                self.total = self.before
        elif len(self.shared) < _SHARED_MAX:
            self.shared.add(known)
            self.total += _SHARED + _SHARED_PAIR * min(pairs, _SHARED_PAIRS_MAX)

    def string(self, text: bytes, *, is_key: bool) -> None:
        if is_key:
            known = hash(text)
            if known in self.keys:
                return
            self.keys.add(known)
            self.total += _KEY
        is_plain = text.isascii() and b"\\" not in text
        self.total += _STRING + len(text) * (1 if is_plain else _letters(text))


def _added_up(raw: bytes, room: int, *, is_shared: bool) -> int:
    """Return what the values take, token by token; any number above `room` if it is more."""
    found = _Sum(shared=set() if is_shared else None)
    for token in _TOKEN.finditer(raw):
        text = token[1]
        if text is not None:
            found.string(text, is_key=token[2] is not None)
        elif (mark := token[0]) in (b"}", b"]"):
            found.close(raw, token.end())
        else:
            _add_mark(found, mark, token.start())
        if found.total > room:
            break
    return found.total


def _add_mark(found: _Sum, mark: bytes, at: int) -> None:
    if mark == b",":
        found.commas += 1
    elif mark in (b"{", b"["):
        found.open(at, is_object=mark == b"{")
    elif not mark.isdigit() or len(mark) > _SHARED_DIGITS:
        found.total += _NUMBER + len(mark)
