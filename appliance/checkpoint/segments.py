"""Extents of a QUASAR container: where each array lies, and that they fill the file soundly."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from appliance.checkpoint.document import as_list
from appliance.checkpoint.faults import refuse
from appliance.checkpoint.header import RANK_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

BYTES_OF: Final = {"U32": 4, "F16": 2, "F32": 4, "F8_E4M3": 1, "BF16": 2, "U8": 1}
ALIGNMENT: Final = 64

_CRC_MAX: Final = 2**32 - 1
_SIZE_MAX: Final = 2**40
_AGAIN: Final = "write the container again"


class Segment(NamedTuple):
    """One array of a container.

    Attributes:
        dtype: Key of `BYTES_OF`.
        shape: Sizes, outermost first.
        begin: First byte, from the start of the file.
        end: Byte after the last.
        crc32: CRC-32 of the bytes, None if the container has none.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    crc32: int | None = None


def are_sizes(values: Sequence[object]) -> bool:
    """Tell whether values are the sizes of an array that there can be, one without elements too."""
    span = 1
    for size in values[: RANK_MAX + 1]:
        if type(size) is not int or not 0 <= size <= _SIZE_MAX:
            return False
        span *= size or 1  # nothing else bounds the other sizes of an empty array
    return len(values) <= RANK_MAX and span <= _SIZE_MAX


def read_segment(
    where: str, table: dict[str, Any], data_offset: int, data_bytes: int, *, has_crc: bool
) -> Segment:
    """Check one segment of the directory against the file.

    Args:
        where: File, tensor and part, for messages.
        table: The entry.
        data_offset: Where the data begin in the file.
        data_bytes: Bytes from there to the end of the file.
        has_crc: The header says that every segment has a CRC-32.

    Raises:
        ApplianceError: E_DTYPE, E_SHAPE, E_SEGMENT_ALIGN, E_SEGMENT_BOUNDS or E_BAD_HEADER.
    """
    dtype, sizes = table.get("dtype"), as_list(table.get("shape"))
    if not isinstance(dtype, str) or dtype not in BYTES_OF:
        raise refuse("E_DTYPE", where, " or ".join(BYTES_OF), repr(dtype)[:80], _AGAIN)
    if sizes is None or not are_sizes(sizes):
        raise refuse("E_SHAPE", where, "a list of sizes", repr(table.get("shape"))[:80], _AGAIN)
    offset, length, crc = (table.get(key) for key in ("offset", "nbytes", "crc32"))
    if type(offset) is not int or type(length) is not int or offset < 0:
        value = f"{offset!r} and {length!r}"[:120]
        raise refuse("E_SEGMENT_BOUNDS", where, "offset and nbytes", value, _AGAIN)
    if offset % ALIGNMENT:
        what = f"an offset in multiples of {ALIGNMENT}"
        raise refuse("E_SEGMENT_ALIGN", where, what, str(offset), _AGAIN)
    wanted = math.prod(sizes) * BYTES_OF[dtype]
    if length != wanted or offset + length > data_bytes:
        what = f"{wanted} bytes within {data_bytes} of data"
        value = f"{length} bytes at {offset}"
        raise refuse("E_SEGMENT_BOUNDS", where, what, value[:120], _AGAIN)
    if has_crc and not (type(crc) is int and 0 <= crc <= _CRC_MAX):
        raise refuse("E_BAD_HEADER", where, "a crc32", repr(crc)[:80], _AGAIN)
    begin = data_offset + offset
    return Segment(dtype, tuple(sizes), begin, begin + length, crc if has_crc else None)


def check_layout(where: str, segments: Sequence[Segment], begin: int, end: int) -> None:
    """Check that segments do not overlap, leave no wide gap, and end where the file does.

    Raises:
        ApplianceError: E_SEGMENT_OVERLAP, E_SEGMENT_ALIGN or E_TRAILING.
    """
    at = begin
    for segment in sorted(segments, key=lambda each: (each.begin, each.end)):
        if segment.begin < at:
            what, value = f"the next segment at byte {at} or later", str(segment.begin)
            raise refuse("E_SEGMENT_OVERLAP", where, what, value, _AGAIN)
        if segment.begin - at >= ALIGNMENT:
            what, value = f"a gap of less than {ALIGNMENT} bytes", str(segment.begin - at)
            raise refuse("E_SEGMENT_ALIGN", f"{where} byte {at}", what, value, _AGAIN)
        at = segment.end
    if at != end:
        raise refuse("E_TRAILING", where, f"the file to end at {at}", str(end), _AGAIN)
