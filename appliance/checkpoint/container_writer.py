"""Writes a QUASAR container 1.0 from arrays in memory or mapped files, whole or not at all."""

from __future__ import annotations

import json
import math
import os
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.checkpoint.container import (
    ALIGNMENT,
    EXTENDED,
    FLAG_CRC,
    HEADER,
    HEADER_CRC_AT,
    MAGIC,
    MAJOR,
    sound_name,
)
from appliance.checkpoint.segments import BYTES_OF
from appliance.checkpoint.writer import storage_errors, sync_directory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_ORDER = ("qweight", "scales", "global", "data")
_CHUNK = 1 << 24


@dataclass(frozen=True)
class ContainerEntry:
    """One tensor to be written.

    Attributes:
        name: Module of a quantized matrix, or name of a dense tensor.
        shape: Sizes of the values.
        parts: `qweight`, `scales` and maybe `global`, or `data`, to type name and array.
        codebook: `e2m1` or `int4_offset8`; empty for a dense tensor.
        group_size: Weights per scale, 0 for a dense tensor.
    """

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, tuple[str, NDArray[Any]]]
    codebook: str = ""
    group_size: int = 0

    def describe(self, segments: dict[str, Any]) -> dict[str, Any]:
        """Return the entry of the directory."""
        table: dict[str, Any] = {"name": self.name, "shape": list(self.shape)}
        if "data" in self.parts:
            return table | {"kind": "dense", "segments": segments}
        scheme = {"codebook": self.codebook, "group_size": self.group_size}
        return table | {"kind": "quant"} | scheme | {"segments": segments}


@dataclass
class _Layout:
    entries: list[dict[str, Any]] = field(default_factory=list)
    placed: list[tuple[int, NDArray[Any]]] = field(default_factory=list)
    end: int = 0


def write_container(
    path: Path, entries: Sequence[ContainerEntry], producer: Mapping[str, Any]
) -> None:
    """Write a container under a `.part` name and rename it.

    Args:
        path: The file to make.
        entries: Tensors in the order of the directory; arrays are read twice.
        producer: Name and version of the writer.

    Raises:
        ValueError: If an array does not fit its type name.
        ApplianceError: E_NAME for a name that no reader takes; DISK_FULL or OUTPUT_UNWRITABLE.
    """
    layout = _lay_out(path, entries)
    table = {
        "format": "quasar",
        "version": f"{MAJOR}.0",
        "producer": dict(producer),
        "tensors": layout.entries,
    }
    directory = json.dumps(table, separators=(",", ":")).encode()
    data_offset = -(-(ALIGNMENT + len(directory)) // ALIGNMENT) * ALIGNMENT
    header = _header(directory, data_offset, data_offset + layout.end)
    part = path.with_name(f"{path.name}.part")
    try:
        with storage_errors(path), part.open("wb") as file:
            file.write(header + directory)
            file.write(bytes(data_offset - ALIGNMENT - len(directory)))
            for begin, array in layout.placed:
                file.write(bytes(data_offset + begin - file.tell()))
                for chunk in _chunks(array):
                    file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        with storage_errors(path):
            part.rename(path)
            sync_directory(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _lay_out(path: Path, entries: Sequence[ContainerEntry]) -> _Layout:
    layout = _Layout()
    for entry in entries:
        sound_name(str(path), entry.name)
        segments: dict[str, Any] = {}
        for name in sorted(entry.parts, key=_ORDER.index):
            dtype, array = entry.parts[name]
            nbytes = math.prod(array.shape) * BYTES_OF[dtype]
            if array.nbytes != nbytes:
                raise ValueError(f"{entry.name} {name}: {dtype}, got {array.dtype}")
            begin = -(-layout.end // ALIGNMENT) * ALIGNMENT
            crc = 0
            for chunk in _chunks(array):
                crc = zlib.crc32(chunk, crc)
            segments[name] = {
                "dtype": dtype,
                "shape": list(array.shape),
                "offset": begin,
                "nbytes": nbytes,
                "crc32": crc,
            }
            layout.placed.append((begin, array))
            layout.end = begin + nbytes
        layout.entries.append(entry.describe(segments))
    return layout


def _header(directory: bytes, data_offset: int, file_bytes: int) -> bytes:
    fields = (MAGIC, EXTENDED, MAJOR, 0, FLAG_CRC, ALIGNMENT, len(directory), data_offset)
    crc = zlib.crc32(directory)
    start = HEADER.pack(*fields, file_bytes, crc, 0, bytes(8))[:HEADER_CRC_AT]
    return HEADER.pack(*fields, file_bytes, crc, zlib.crc32(start), bytes(8))


def _chunks(array: NDArray[Any]) -> list[memoryview]:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return [flat[begin : begin + _CHUNK].data for begin in range(0, len(flat), _CHUNK)]
