"""QUASAR container 1.0: one file with a directory of named tensors; docs/format.md has the bytes.

Opening reads header and directory and checks every extent against the file; `check_payload` reads
the rest. Nothing is believed: sizes, offsets and names may be hostile.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import stat
import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from appliance.checkpoint.document import as_list, as_object, parse_unique
from appliance.checkpoint.faults import refuse
from appliance.checkpoint.segments import Segment, are_sizes, check_layout, read_segment
from appliance.checkpoint.stored import NVFP4_GROUP, QUASAR_GROUP

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAGIC: Final = b"\x1c\x0a\x0d\x0a"
EXTENDED: Final = 0xFFFFFFFF
"""Second word of a container; in the legacy form it is a count, so old readers refuse."""

MAJOR: Final = 1
ALIGNMENT: Final = 64
HEADER: Final = struct.Struct("<4sIHHIQQQQII8s")
HEADER_CRC_AT: Final = 52
DIRECTORY_BYTES_MAX: Final = 64 * 1024**2
FLAG_CRC: Final = 1
CODEBOOKS: Final = ("e2m1", "int4_offset8")

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_NAME_LENGTH_MAX = 512
_REFETCH: Final = "fetch the file again"
_AGAIN: Final = "write the container again"
_ENTRY_BYTES: Final = 400
"""What is made of each object of the directory: a tensor or a segment."""


@dataclass(frozen=True)
class ContainerTensor:
    """One entry of the directory.

    Attributes:
        name: Name of the module of a quantized matrix, or of a dense tensor.
        shape: Sizes of the values.
        segments: `qweight`, `scales` and maybe `global`, or `data`.
        codebook: `e2m1` or `int4_offset8`; empty for a dense tensor.
        group_size: Weights per scale, 0 for a dense tensor.
    """

    name: str
    shape: tuple[int, ...]
    segments: Mapping[str, Segment]
    codebook: str = ""
    group_size: int = 0

    @property
    def is_dense(self) -> bool:
        """Whether the tensor is stored as it is."""
        return "data" in self.segments


@dataclass(frozen=True)
class Container:
    """What a container file says of itself; extents count from the start of the file.

    Attributes:
        path: The file, for messages and for reading.
        tensors: Entries in the order of the directory.
        has_checksums: Each segment has a CRC-32.
        producer: What the directory says of its writer.
        is_legacy: A form without checksums and alignment.
        scales_path: File of the scales where the legacy form keeps them apart.
    """

    path: Path
    tensors: tuple[ContainerTensor, ...]
    has_checksums: bool = False
    producer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_legacy: bool = False
    scales_path: Path | None = None

    def file_of(self, part: str) -> Path:
        """Return the file that holds a part: `qweight`, `scales`, `global` or `data`."""
        apart = self.scales_path if part == "scales" else None
        return self.path if apart is None else apart


@dataclass(frozen=True)
class _Header:
    flags: int
    directory_bytes: int
    data_offset: int
    file_bytes: int
    directory_crc: int


def read_container(path: Path) -> Container:
    """Read header and directory of a container.

    Raises:
        ApplianceError: Exit 31 for E_TRUNCATED, E_TRAILING, E_HEADER_CRC, E_DIR_CRC and
            E_BAD_HEADER; exit 30 for E_MAGIC, E_VERSION, E_NAME, E_DTYPE, E_SHAPE, E_GROUP_SIZE,
            E_CODEBOOK, E_DUPLICATE_TENSOR, E_SEGMENT_ALIGN, E_SEGMENT_OVERLAP, E_SEGMENT_BOUNDS and
            E_UNREADABLE.
    """
    where = str(path)
    start, size = read_start(path, HEADER.size)
    if start[:4] != MAGIC:
        raise refuse(
            "E_MAGIC", where, f"to begin with {MAGIC.hex(' ')}", start[:4].hex(" "), _AGAIN
        )
    header = _header(where, start, size)
    raw = read_span(path, ALIGNMENT, header.directory_bytes)
    if zlib.crc32(raw) != header.directory_crc:
        value = f"{zlib.crc32(raw):08x}"
        raise refuse("E_DIR_CRC", where, f"CRC {header.directory_crc:08x}", value, _REFETCH)
    directory = _directory(where, raw, size)
    has_crc = bool(header.flags & FLAG_CRC)
    data_bytes = size - header.data_offset
    tensors = _tensors(where, directory, header.data_offset, data_bytes, has_crc=has_crc)
    segments = [part for tensor in tensors for part in tensor.segments.values()]
    check_layout(where, segments, header.data_offset, size)
    return Container(path, tensors, has_crc, as_object(directory.get("producer")) or {})


def is_container(path: Path) -> bool:
    """Tell whether a regular file begins as a container or its legacy inline form does."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def check_payload(container: Container) -> None:
    """Compare every segment with its CRC-32, and the bytes between segments with zero.

    Raises:
        ApplianceError: E_PAYLOAD_CRC (exit 31) with the tensor's name.
    """
    for tensor in container.tensors:
        for part, segment in tensor.segments.items():
            if segment.crc32 is None:
                continue
            crc = 0
            for begin in range(segment.begin, segment.end, 1 << 24):
                length = min(1 << 24, segment.end - begin)
                crc = zlib.crc32(read_span(container.path, begin, length), crc)
            if crc != segment.crc32:
                where, value = f"{container.path} {tensor.name}.{part}", f"{crc:08x}"
                raise refuse("E_PAYLOAD_CRC", where, f"{segment.crc32:08x}", value, _REFETCH)
    if not container.is_legacy:
        _check_gaps(container)


def _check_gaps(container: Container) -> None:
    ends = sorted(
        (part.begin, part.end) for each in container.tensors for part in each.segments.values()
    )
    for (_, end), (begin, _) in itertools.pairwise(ends):
        if begin > end and any(read_span(container.path, end, begin - end)):
            where = f"{container.path} byte {end}"
            raise refuse("E_PAYLOAD_CRC", where, "zeros between segments", "others", _REFETCH)


def read_start(path: Path, length: int) -> tuple[bytes, int]:
    """Return the first bytes of a regular file and its size.

    Raises:
        ApplianceError: E_UNREADABLE, E_LFS_POINTER, or E_TRUNCATED if it is shorter.
    """
    where = str(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise refuse("E_UNREADABLE", where, "a regular file", "something else", _REFETCH)
        with path.open("rb") as file:
            start, size = file.read(length), os.fstat(file.fileno()).st_size
    except OSError as error:
        value = error.strerror or type(error).__name__
        raise refuse("E_UNREADABLE", where, "a readable file", value, _REFETCH) from None
    if start.startswith(b"version https://git-lfs"):
        fix = "fetch the weights with `git lfs pull`"
        raise refuse("E_LFS_POINTER", where, "a container", "a Git LFS pointer", fix)
    if len(start) < length:
        # The magic is asked first: another kind of short file is no truncated container.
        code = "E_TRUNCATED" if start[:4] == MAGIC else "E_MAGIC"
        raise refuse(code, where, f"at least {length} bytes", f"{len(start)}", _REFETCH)
    return start, size


def read_span(path: Path, begin: int, length: int) -> bytes:
    """Return bytes of a file.

    Raises:
        ApplianceError: E_UNREADABLE, or E_TRUNCATED if it ends before.
    """
    try:
        with path.open("rb") as file:
            file.seek(begin)
            found = file.read(length)
    except OSError as error:
        value = error.strerror or type(error).__name__
        raise refuse("E_UNREADABLE", str(path), "a readable file", value, _REFETCH) from None
    if len(found) < length:
        what = f"{begin + length} bytes"
        raise refuse("E_TRUNCATED", str(path), what, f"{begin + len(found)}", _REFETCH)
    return found


def _header(where: str, start: bytes, size: int) -> _Header:
    _, marker, major, minor, flags, at, length, data, total, dir_crc, crc, rest = HEADER.unpack(
        start
    )
    if marker != EXTENDED:
        what, value = "an extended header", f"the legacy form with {marker} groups"
        fix = "give its quasar_index.json: the legacy form names no tensor"
        raise refuse("E_LEGACY_NO_INDEX", where, what, value, fix)
    if zlib.crc32(start[:HEADER_CRC_AT]) != crc:
        value = f"{zlib.crc32(start[:HEADER_CRC_AT]):08x}"
        raise refuse("E_HEADER_CRC", where, f"header CRC {crc:08x}", value, _REFETCH)
    if major != MAJOR or flags & ~FLAG_CRC:
        value = f"{major}.{minor} with flags {flags:#x}"
        fix = "use a newer appliance, or write the container again"
        raise refuse("E_VERSION", where, f"version {MAJOR}.x, flags 0 or 1", value, fix)
    is_sound = at == ALIGNMENT and length <= DIRECTORY_BYTES_MAX and not any(rest)
    if not is_sound:
        value = f"a directory of {length} bytes at {at}"
        what = f"a directory of at most {DIRECTORY_BYTES_MAX} bytes at {ALIGNMENT}, then zeros"
        raise refuse("E_BAD_HEADER", where, what, value, _AGAIN)
    if data % ALIGNMENT or not 0 <= data - at - length < ALIGNMENT:
        what = f"the data right behind the directory, at a multiple of {ALIGNMENT}"
        raise refuse("E_SEGMENT_ALIGN", where, what, str(data), _AGAIN)
    if size != total or size < data:
        code = "E_TRUNCATED" if size < max(total, data) else "E_TRAILING"
        raise refuse(code, where, f"{max(total, data)} bytes", str(size), _REFETCH)
    return _Header(flags, length, data, total, dir_crc)


def _directory(where: str, raw: bytes, size: int) -> dict[str, Any]:
    try:
        content: object = parse_unique(raw, file_bytes=size, object_bytes=_ENTRY_BYTES)
    except (ValueError, RecursionError) as error:
        value = f"{type(error).__name__}: {str(error)[:120]}"
        raise refuse("E_BAD_HEADER", where, "a JSON directory", value, _AGAIN) from None
    table = as_object(content) or {}
    stated = (table.get("format"), table.get("version"))
    if stated[0] != "quasar" or not str(stated[1]).startswith(f"{MAJOR}."):
        value = repr(stated)[:120]
        raise refuse("E_VERSION", where, f'format "quasar", version "{MAJOR}.x"', value, _AGAIN)
    return table


def _tensors(
    where: str, directory: dict[str, Any], data_offset: int, data_bytes: int, *, has_crc: bool
) -> tuple[ContainerTensor, ...]:
    entries = as_list(directory.get("tensors"))
    if entries is None:
        raise refuse("E_BAD_HEADER", where, "a list of tensors", "none", _AGAIN)
    found: dict[str, ContainerTensor] = {}
    for entry in entries:
        table = as_object(entry) or {}
        name = sound_name(where, table.get("name"))
        if name in found:
            raise refuse("E_DUPLICATE_TENSOR", f"{where} {name}", "one entry", "two", _AGAIN)
        found[name] = _tensor(f"{where} {name}", name, table, data_offset, data_bytes, has_crc)
    return tuple(found.values())


def sound_name(where: str, name: object) -> str:
    """Return a tensor's name if it can be one: no path, no empty component.

    Raises:
        ApplianceError: E_NAME.
    """
    if (
        not isinstance(name, str)
        or len(name) > _NAME_LENGTH_MAX
        or not _NAME.fullmatch(name)
        or not all(name.split("."))
    ):
        what = "a name of letters, digits, _ and -, joined by single dots"
        raise refuse("E_NAME", where, what, repr(name)[:120], _AGAIN)
    return name


def sound_shape(where: str, value: object) -> tuple[int, ...]:
    """Return a shape if it is one.

    Raises:
        ApplianceError: E_SHAPE.
    """
    sizes = as_list(value)
    if sizes is None or not are_sizes(sizes):
        raise refuse("E_SHAPE", where, "a list of sizes", repr(value)[:120], _AGAIN)
    return tuple(sizes)


def _tensor(  # noqa: PLR0917 - what one entry is read with
    where: str, name: str, table: dict[str, Any], data_offset: int, data_bytes: int, has_crc: bool
) -> ContainerTensor:
    kind, shape = table.get("kind"), sound_shape(where, table.get("shape"))
    entries = as_object(table.get("segments")) or {}
    wanted = {"quant": {"qweight", "scales"}, "dense": {"data"}}.get(str(kind))
    optional = {"global"} if kind == "quant" else set[str]()
    if wanted is None or not wanted <= entries.keys() <= wanted | optional:
        what = "kind quant with qweight and scales, or dense with data"
        value = f"{kind!r} with {', '.join(sorted(entries)[:8])}"
        raise refuse("E_BAD_HEADER", where, what, value[:160], _AGAIN)
    segments = {
        part: read_segment(
            f"{where}.{part}", as_object(entry) or {}, data_offset, data_bytes, has_crc=has_crc
        )
        for part, entry in entries.items()
    }
    if kind == "dense":
        if segments["data"].shape != shape:
            value = str(list(segments["data"].shape))
            raise refuse("E_SHAPE", where, str(list(shape)), value, _AGAIN)
        return ContainerTensor(name, shape, segments)
    codebook, group = sound_scheme(where, table)
    _check_quantized(where, shape, group, segments)
    return ContainerTensor(name, shape, segments, codebook, group)


def sound_scheme(where: str, table: Mapping[str, Any]) -> tuple[str, int]:
    """Return codebook and group size of a quantized entry.

    Raises:
        ApplianceError: E_CODEBOOK or E_GROUP_SIZE.
    """
    codebook, group = table.get("codebook"), table.get("group_size")
    if codebook not in CODEBOOKS:
        what = f"one of {', '.join(CODEBOOKS)}; codes between a minimum and a maximum have no zero"
        raise refuse("E_CODEBOOK", where, what, repr(codebook)[:80], "quantize the original again")
    if type(group) is not int or group not in (NVFP4_GROUP, QUASAR_GROUP):
        raise refuse("E_GROUP_SIZE", where, "16 or 128", repr(group)[:80], _AGAIN)
    return str(codebook), group


def _check_quantized(
    where: str, shape: tuple[int, ...], group: int, segments: Mapping[str, Segment]
) -> None:
    if len(shape) != 2 or shape[1] % group or not math.prod(shape):  # noqa: PLR2004 - a matrix
        what = f"[N, K] with K a multiple of {group}"
        raise refuse("E_SHAPE", where, what, str(list(shape)), _AGAIN)
    scales = ("F8_E4M3",) if group == NVFP4_GROUP else ("F16", "F32")
    wanted = {
        "qweight": (("U32",), ((shape[0], shape[1] // 8),)),
        "scales": (scales, ((shape[0], shape[1] // group),)),
        "global": (("F32",), ((), (1,))),
    }
    for part, segment in segments.items():
        types, shapes = wanted[part]
        if segment.dtype not in types:
            what, code = " or ".join(types), "E_DTYPE"
            raise refuse(code, f"{where}.{part}", what, segment.dtype, _AGAIN)
        if segment.shape not in shapes:
            code = "E_SCALE_SHAPE" if part != "qweight" else "E_SHAPE"
            value = str(list(segment.shape))
            raise refuse(code, f"{where}.{part}", str(list(shapes[-1])), value, _AGAIN)
