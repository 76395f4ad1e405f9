"""Reads a safetensors checkpoint, one file or sharded, as numpy views on memory-mapped files.

Opening reads headers only. A tensor's bytes are touched when its array is, and `release` gives the
pages back, so a checkpoint far larger than memory streams through.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from appliance.checkpoint.faults import refuse
from appliance.checkpoint.shards import read_shards

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

    from appliance.checkpoint.header import StoredTensor

# numpy has no bfloat16 and no 8-bit floats: those come as the unsigned integer of their width.
NUMPY_TYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        name: Name in the checkpoint.
        dtype: safetensors type name, such as `BF16`.
        shape: Lengths of the axes; empty for a scalar.
        shard: File name inside the checkpoint.
        begin: First byte in the file.
        end: Byte after the last one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.begin

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class TensorReader:
    """The tensors of one checkpoint directory, by name."""

    def __init__(self, root: Path, entries: Sequence[TensorEntry], shards: Sequence[str]) -> None:
        """Keep the entries; use `open_tensors` to make one from a directory."""
        self.root = root
        self.shards = tuple(shards)
        self._entries = {entry.name: entry for entry in entries}
        self._maps: dict[str, mmap.mmap] = {}

    def __enter__(self) -> Self:
        """Return the reader itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Forget every mapping; arrays still held keep theirs alive."""
        self._maps.clear()

    def __contains__(self, name: object) -> bool:
        """Whether the checkpoint has this tensor."""
        return name in self._entries

    def names(self) -> tuple[str, ...]:
        """Every tensor, shard by shard, each shard in file order."""
        return tuple(self._entries)

    def entry(self, name: str) -> TensorEntry:
        """Place, type and shape of one tensor.

        Raises:
            ApplianceError: E_MISSING_TENSOR if the checkpoint has no such tensor.
        """
        try:
            return self._entries[name]
        except KeyError:
            raise refuse(
                "E_MISSING_TENSOR",
                f"{self.root} {name}",
                "the checkpoint must have this tensor",
                "none",
                "download the checkpoint again or use a complete one",
            ) from None

    def in_shard(self, shard: str) -> tuple[TensorEntry, ...]:
        """The tensors of one file, in file order."""
        return tuple(entry for entry in self._entries.values() if entry.shard == shard)

    def array(self, name: str) -> NDArray[Any]:
        """View one tensor without copying it, unless its file has it at an odd place.

        The format leaves it to the writer whether headers and tensors end on even bytes.

        Returns:
            A read-only array of the tensor's shape, row-major; BF16 as uint16 bits, 8-bit floats as
            uint8 bits, everything else in its own type.
        """
        entry = self.entry(name)
        kind = NUMPY_TYPES[entry.dtype]
        if entry.elements == 0:
            return np.empty(entry.shape, kind)
        flat = np.frombuffer(self._map(entry.shard), kind, entry.elements, entry.begin)
        if not flat.flags.aligned:  # C code and processors want numbers at multiples of their size
            flat = flat.copy()
            flat.flags.writeable = False
        return flat.reshape(entry.shape)

    def float32(self, name: str) -> NDArray[np.float32]:
        """Copy one F16, BF16, F32 or F64 tensor as float32 of the same shape.

        Raises:
            ApplianceError: E_DTYPE for any other type.
        """
        entry = self.entry(name)
        bits = self.array(name)
        if entry.dtype == "BF16":
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if entry.dtype in {"F16", "F32", "F64"}:
            return bits.astype(np.float32)
        raise refuse(
            "E_DTYPE",
            f"{self.root / entry.shard} {name}",
            "a dense tensor is F16, BF16, F32 or F64",
            entry.dtype,
            "use a dense checkpoint",
        )

    def release(self, name: str) -> None:
        """Give the memory of a tensor's pages back; its array stays valid and reads them again."""
        entry = self.entry(name)
        mapped = self._maps.get(entry.shard)
        first = -(-entry.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = entry.end // mmap.PAGESIZE * mmap.PAGESIZE
        if mapped is not None and last > first:
            mapped.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _map(self, shard: str) -> mmap.mmap:
        if shard not in self._maps:
            path, fix = self.root / shard, "leave the source alone while it is read; run again"
            wanted = max(entry.end for entry in self._entries.values() if entry.shard == shard)
            try:
                with path.open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:  # ValueError: an empty file has no pages
                raise refuse("E_UNREADABLE", str(path), "a shard", str(error), fix) from None
            if len(mapped) < wanted:
                value = f"a file of {len(mapped)} bytes"
                raise refuse("E_TRUNCATED", str(path), f"{wanted} bytes", value, fix)
            self._maps[shard] = mapped
        return self._maps[shard]


def open_tensors(root: Path) -> TensorReader:
    """Open a checkpoint directory by the headers of its files.

    Args:
        root: Directory with an index and its shards, or with safetensors files alone.

    Raises:
        ApplianceError: What `read_shards` raises, and E_DTYPE (exit 30) for a type without a numpy
            counterpart.
    """
    shards = read_shards(root)
    entries: list[TensorEntry] = []
    for shard, header in shards.headers.items():
        placed = sorted(header.tensors.items(), key=lambda item: (item[1].begin, item[1].end))
        entries += [_entry(root, shard, name, stored) for name, stored in placed]
    return TensorReader(root, entries, tuple(shards.headers))


def _entry(root: Path, shard: str, name: str, stored: StoredTensor) -> TensorEntry:
    if stored.dtype not in NUMPY_TYPES:
        raise refuse(
            "E_DTYPE",
            f"{root / shard} {name}",
            f"one of {', '.join(NUMPY_TYPES)}",
            stored.dtype,
            "store the tensor in a type that this version reads",
        )
    return TensorEntry(name, stored.dtype, stored.shape, shard, stored.begin, stored.end)
