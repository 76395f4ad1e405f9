"""Walks the header of a GGUF file once, so that no count in it reaches the reader unchecked.

The gguf package believes counts: an array of 2^31 numbers in a file of a kilobyte keeps it busy for
hours. Every element counted here lies inside the file.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, Protocol

from appliance.checkpoint.faults import refuse

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING: Final = 8
_ARRAY: Final = 9
_AXES_MAX: Final = 4
_TENSOR_BYTES_MIN: Final = 8 + 4 + 4 + 8
_KEY_BYTES_MIN: Final = 8 + 4 + 1


class _File(Protocol):
    """What is asked of an open file."""

    def read(self, size: int, /) -> bytes: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...


class _Walk:
    """A place in the file that never leaves it."""

    def __init__(self, file: _File, size: int) -> None:
        self.file = file
        self.size = size
        self.at = 0

    def skip(self, count: int) -> None:
        """Go on by so many bytes."""
        self.at += count
        if self.at > self.size:
            raise ValueError(f"{self.at} of {self.size} bytes")
        self.file.seek(self.at)

    def number(self, form: str) -> int:
        """Read one number."""
        width = struct.calcsize(form)
        self.at += width
        if self.at > self.size:
            raise ValueError(f"{self.at} of {self.size} bytes")
        return int(struct.unpack(form, self.file.read(width))[0])

    def count(self, form: str, least: int) -> int:
        """Read a count of things that take at least so many bytes each."""
        found = self.number(form)
        if found * least > self.size - self.at:
            raise ValueError(f"{found} elements in {self.size - self.at} bytes")
        return found

    def text(self) -> None:
        """Pass a text."""
        self.skip(self.count("<Q", 1))


def scan(path: Path) -> None:
    """Check every count and length in the header of a GGUF file.

    Raises:
        ApplianceError: GGUF_UNREADABLE.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            _walk(_Walk(file, size))
    except (OSError, ValueError, struct.error) as error:
        what, fix = "a GGUF file of version 2 or 3", "check the path or download the file again"
        value = str(error)[:120] or type(error).__name__
        raise refuse("GGUF_UNREADABLE", str(path), what, value, fix) from None


def _walk(walk: _Walk) -> None:
    if walk.file.read(4) != _MAGIC:
        raise ValueError("another magic")
    walk.skip(4)
    version = walk.number("<I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}")
    tensors = walk.count("<Q", _TENSOR_BYTES_MIN)
    for _ in range(walk.count("<Q", _KEY_BYTES_MIN)):
        walk.text()
        _pass_value(walk, walk.number("<I"))
    for _ in range(tensors):
        walk.text()
        axes = walk.number("<I")
        if axes > _AXES_MAX:
            raise ValueError(f"{axes} axes")
        walk.skip(8 * axes + 4 + 8)


def _pass_value(walk: _Walk, kind: int) -> None:
    if kind == _ARRAY:
        inner = walk.number("<I")
        if inner == _STRING:
            for _ in range(walk.count("<Q", 8)):
                walk.text()
            return
        width = _width(inner)
        walk.skip(walk.count("<Q", width) * width)
    elif kind == _STRING:
        walk.text()
    else:
        walk.skip(_width(kind))


def _width(kind: int) -> int:
    if kind not in _SIZES:
        raise ValueError(f"a value of type {kind}")
    return _SIZES[kind]
