"""Safetensors headers, read from files that may be broken or hostile; no weight is touched."""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from appliance.checkpoint.document import check_elements, require_unique
from appliance.checkpoint.footprint import require_footprint

if TYPE_CHECKING:
    from pathlib import Path

HEADER_BYTES_MIN = 2
HEADER_BYTES_MAX = 100_000_000
"""Longest header the safetensors library itself accepts."""

DTYPE_BITS = {
    "F4": 4,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}

RANK_MAX = 8
SPAN_MAX = 2**48
"""Most elements along all axes but empty ones: an empty tensor of any sizes has no bytes that would
bound them, and no array can have them."""

BITS_A_BYTE = 8

_LENGTH_BYTES = 8
_POINTER = b"version https://git-lfs"
_REFETCH = "fetch the file again"
_ENTRY_BYTES = 550
"""What is made of each entry of a header, its shape alike to no other's."""


class StoredTensor(NamedTuple):
    """One tensor of a file; light, since a checkpoint has up to 100,000 of them.

    Attributes:
        dtype: Name as safetensors spells it, a key of `DTYPE_BITS`.
        shape: Sizes, outermost first.
        begin: First byte, counted from the start of the file.
        end: Byte after the last.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class HeaderError(Exception):
    """One file cannot be read as safetensors.

    Attributes:
        code: `E_TRUNCATED`, `E_TRAILING`, `E_LFS_POINTER`, `E_BAD_HEADER`, `E_MISSING_SHARD` or
            `E_UNREADABLE`.
        what: What was expected.
        value: What was found.
        fix: What the reader can do now.
    """

    def __init__(self, code: str, what: str, value: str, fix: str) -> None:
        """Keep the parts of the later one-line message."""
        super().__init__(f"{code}: {what}, got {value}")
        self.code = code
        self.what = what
        self.value = value
        self.fix = fix


Form = tuple[str, tuple[int, ...]]
"""dtype and shape; tensors that look alike share one object."""


@dataclass(frozen=True)
class ShardHeader:
    """What one safetensors file says of itself.

    Attributes:
        forms: Tensor name to dtype and shape.
        extents: First byte and byte after the last of each, in the same order, counted from the
            start of the data.
        file_bytes: Bytes of the whole file.
        raw: The header as stored, for a digest.
    """

    forms: dict[str, Form]
    extents: list[tuple[int, int]]
    file_bytes: int
    raw: bytes

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Tensor name to dtype, shape and place in the file."""
        start = _LENGTH_BYTES + len(self.raw)
        return {
            name: StoredTensor(dtype, shape, start + begin, start + end)
            for (name, (dtype, shape)), (begin, end) in zip(
                self.forms.items(), self.extents, strict=True
            )
        }


def read_header(path: Path) -> ShardHeader:
    """Read and check the header of one safetensors file.

    Every tensor's extent must follow from dtype and shape, the extents must fill the file without
    gap or overlap, and the file must end where the last one ends.

    Raises:
        HeaderError: If the file is missing, unreadable, a Git LFS pointer, too short, too long, or
            its header is not well formed.
    """
    raw, file_bytes = _read_raw(path)
    forms, extents = _entries(_parse(raw, file_bytes))
    _check_extents(extents, file_bytes - _LENGTH_BYTES - len(raw))
    return ShardHeader(forms, extents, file_bytes, raw)


def _read_raw(path: Path) -> tuple[bytes, int]:
    try:
        # Asked before opening: opening a pipe would wait for its writer.
        if not stat.S_ISREG(path.stat().st_mode):
            _fail("E_UNREADABLE", "a regular file", "something else", "put the shard there")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            start = file.read(_LENGTH_BYTES)
            if start == _POINTER[:_LENGTH_BYTES]:
                fix = "fetch the weights with `git lfs pull`"
                _fail("E_LFS_POINTER", "a safetensors file", "a Git LFS pointer", fix)
            if len(start) < _LENGTH_BYTES:
                what = f"at least {_LENGTH_BYTES} bytes for the header length"
                _fail("E_TRUNCATED", what, f"{status.st_size} bytes", _REFETCH)
            length = int.from_bytes(start, "little")
            _check_length(length, status.st_size)
            return file.read(length), status.st_size
    except FileNotFoundError:
        _fail("E_MISSING_SHARD", "a shard of the checkpoint", "no such file", _REFETCH)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        fix = "make the file readable for the user that serves"
        _fail("E_UNREADABLE", "a readable shard", reason, fix)


def _check_length(length: int, file_bytes: int) -> None:
    if not HEADER_BYTES_MIN <= length <= HEADER_BYTES_MAX:
        what = f"a header of {HEADER_BYTES_MIN} to {HEADER_BYTES_MAX} bytes"
        _fail("E_BAD_HEADER", what, f"a header length of {length}", _REFETCH)
    if _LENGTH_BYTES + length > file_bytes:
        what = f"{_LENGTH_BYTES + length} bytes of header"
        _fail("E_TRUNCATED", what, f"a file of {file_bytes} bytes", _REFETCH)


def _parse(raw: bytes, file_bytes: int) -> dict[str, Any]:
    if raw[:1] != b"{":
        _bad("a JSON object", repr(raw[:16]))
    try:
        table = _loads(raw, file_bytes)
    except (ValueError, RecursionError) as error:
        _bad("a JSON object", f"{type(error).__name__}: {str(error)[:120]}")
    metadata = table.pop("__metadata__", None)
    if metadata is not None and not isinstance(metadata, dict):
        _bad("__metadata__ as an object", type(metadata).__name__)
    return table


def _loads(raw: bytes, file_bytes: int) -> dict[str, Any]:
    check_elements(raw)
    require_footprint(raw, file_bytes, is_kept=True, object_bytes=_ENTRY_BYTES)
    text = raw.decode("utf-8")
    table: dict[str, Any] = json.loads(text)
    try:  # a repeated key would silently win over the first
        keys = len(table) + sum(map(len, table.values()))
    except TypeError:
        keys = -1
    if keys != raw.count(b":"):
        require_unique(text, table)
    if b"\\u" in raw:
        "".join(table).encode()  # half of a surrogate pair is no name, and cannot be written
    return table


def _entries(table: dict[str, Any]) -> tuple[dict[str, Form], list[tuple[int, int]]]:
    forms: dict[str, Form] = {}
    extents: list[tuple[int, int]] = []
    known: dict[tuple[Any, ...], tuple[Form, int]] = {}
    for name, entry in table.items():
        try:
            begin, end = entry["data_offsets"]
            key = (entry["dtype"], *entry["shape"])
            form, size = known.get(key) or known.setdefault(key, _measure(*key))
        except (KeyError, TypeError, ValueError):
            _bad_entry(name, entry)
        if not type(begin) is type(end) is int or end - begin != size or begin < 0:
            _bad_entry(name, entry)
        forms[name] = form
        extents.append((begin, end))
    return forms, extents


def _bad_entry(name: str, entry: object) -> NoReturn:
    what = f"dtype, shape and matching data_offsets of {name[:120]!r}"
    _bad(what, repr(entry)[:160])


def _measure(dtype: Any, *shape: Any) -> tuple[Form, int]:  # noqa: ANN401 - of a hostile file
    """Return dtype, shape and bytes of a tensor; raises what tells that they are not sound."""
    if len(shape) > RANK_MAX or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(shape)
    if math.prod(size or 1 for size in shape) > SPAN_MAX:
        raise ValueError(shape)
    bits = DTYPE_BITS[dtype] * math.prod(shape)
    if bits % BITS_A_BYTE:
        raise ValueError(shape)
    return (dtype, shape), bits // BITS_A_BYTE


def _check_extents(extents: list[tuple[int, int]], data_bytes: int) -> None:
    position = 0
    for begin, end in sorted(extents):
        if begin != position:
            _bad(f"the next tensor at data byte {position}", str(begin))
        position = end
    if position > data_bytes:
        _fail("E_TRUNCATED", f"{position} bytes of data", str(data_bytes), _REFETCH)
    if position < data_bytes:
        _fail("E_TRAILING", f"{position} bytes of data", str(data_bytes), _REFETCH)


def _bad(what: str, value: str) -> NoReturn:
    _fail("E_BAD_HEADER", what, value, f"{_REFETCH}, or export the checkpoint again")


def _fail(code: str, what: str, value: str, fix: str) -> NoReturn:
    raise HeaderError(code, what, value, fix)
