"""Writes the files of a checkpoint, each whole or not at all.

A file is written under a `.part` name, flushed to the disk and renamed. The directory that they are
gathered in is `appliance.checkpoint.staging`'s.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from appliance.checkpoint.shards import INDEX_NAME
from appliance.checkpoint.tensors import NUMPY_TYPES
from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

SINGLE_NAME = "model.safetensors"

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_ALIGNMENT = 8  # of the data section, as the safetensors library writes it


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written.

    Attributes:
        name: Name in the checkpoint.
        dtype: safetensors type name, such as `BF16`.
        shape: Lengths of the axes; empty for a scalar.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes it takes in a file."""
        return math.prod(self.shape) * NUMPY_TYPES[self.dtype].itemsize


class ShardWriter:
    """Writes one safetensors file tensor by tensor, in any order, and holds none of them."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        """Lay the file out; `with` opens `PATH.part`, and a clean end renames it to `PATH`.

        Wider elements come first, so that every tensor starts at a multiple of its element's width.
        """
        ordered = sorted(specs, key=lambda spec: -NUMPY_TYPES[spec.dtype].itemsize)
        self.path = path
        self._part = path.with_name(path.name + ".part")
        self._header, self._size = _header_bytes(ordered)
        self._pending: dict[str, tuple[TensorSpec, int]] = {}
        at = len(self._header)
        for spec in ordered:
            self._pending[spec.name] = (spec, at)
            at += spec.nbytes
        self._file: Any = None

    def __enter__(self) -> Self:
        """Open the file, reserve its whole size and write the header.

        Raises:
            ApplianceError: DISK_FULL or OUTPUT_UNWRITABLE, exit 12.
        """
        try:
            with storage_errors(self.path):
                self._file = self._part.open("wb")
                os.posix_fallocate(self._file.fileno(), 0, self._size)
                self._file.write(self._header)
        except ApplianceError:
            self._discard()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Flush and rename the finished file, or remove the unfinished one.

        Raises:
            ValueError: If a tensor was not written.
            ApplianceError: DISK_FULL or OUTPUT_UNWRITABLE, exit 12.
        """
        if kind is not None or self._pending:
            self._discard()
            if kind is None:
                raise ValueError(f"{self.path.name}: not written: {next(iter(self._pending))}")
            return
        try:
            with storage_errors(self.path):
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                self._part.rename(self.path)
                sync_directory(self.path.parent)
        except ApplianceError:
            self._discard()
            raise

    def write(self, name: str, array: NDArray[Any]) -> None:
        """Put one tensor in its place; type width and shape must be those of its spec.

        Raises:
            ValueError: If the array does not fit its spec.
            KeyError: If the file has no such tensor or it was written before.
            ApplianceError: DISK_FULL or OUTPUT_UNWRITABLE, exit 12.
        """
        spec, offset = self._pending.pop(name)
        if array.shape != spec.shape or array.nbytes != spec.nbytes:
            raise ValueError(f"expected {spec}, got {name} {array.dtype} {array.shape}")
        with storage_errors(self.path):
            self._file.seek(offset)
            self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _discard(self) -> None:
        """Remove the unfinished file; closing may fail again on the same full disk."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._part.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file whole or not at all.

    Raises:
        ApplianceError: DISK_FULL or OUTPUT_UNWRITABLE, exit 12.
    """
    part = path.with_name(path.name + ".part")
    try:
        with storage_errors(path):
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
            sync_directory(path.parent)
    except ApplianceError:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    """Write a JSON file whole or not at all, indented, keys in the order given."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        content = text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON can say it, UTF-8 cannot
        content = (json.dumps(value, indent=2) + "\n").encode()
    write_file(path, content)


def write_index(root: Path, shards: Mapping[str, Sequence[TensorSpec]]) -> None:
    """Write `model.safetensors.index.json`, which a single `model.safetensors` does not need."""
    if list(shards) == [SINGLE_NAME]:
        return
    total = sum(spec.nbytes for specs in shards.values() for spec in specs)
    weight_map = {spec.name: shard for shard, specs in shards.items() for spec in specs}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(root / INDEX_NAME, index)


def plan_shards(
    specs: Sequence[TensorSpec], *, limit_bytes: int
) -> dict[str, tuple[TensorSpec, ...]]:
    """Spread tensors over files of at most `limit_bytes` (one larger tensor gets its own file)."""
    groups: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in specs:
        if groups[-1] and used + spec.nbytes > limit_bytes:
            groups.append([])
            used = 0
        groups[-1].append(spec)
        used += spec.nbytes
    if len(groups) == 1:
        return {SINGLE_NAME: tuple(groups[0])}
    count = len(groups)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": tuple(group)
        for number, group in enumerate(groups, start=1)
    }


def require_room(directory: Path, wanted_bytes: int) -> None:
    """Refuse a run that the file system has no room for.

    Raises:
        ApplianceError: DISK_FULL, exit 12.
    """
    with storage_errors(directory):
        places = (directory, *directory.absolute().parents)
        existing = next(path for path in places if path.exists())
        free = shutil.disk_usage(existing).free
    if wanted_bytes > free:
        raise ApplianceError(
            ExitCode.CONTAINER,
            Fault(
                "DISK_FULL",
                str(existing),
                f"the output takes {format_bytes(wanted_bytes)}",
                f"{format_bytes(free)} free",
                f"free {format_bytes(wanted_bytes - free)} there or choose another directory",
            ),
        )


@contextlib.contextmanager
def storage_errors(path: Path) -> Generator[None]:
    """Turn what the file system says into DISK_FULL or OUTPUT_UNWRITABLE, exit 12."""
    try:
        yield
    except OSError as error:
        full = error.errno in _NO_ROOM
        fault = Fault(
            "DISK_FULL" if full else "OUTPUT_UNWRITABLE",
            str(error.filename2 or error.filename or path),  # a rename fails at its target
            "the output must fit" if full else "the output must be writable",
            error.strerror or type(error).__name__,
            "make room and run the same command again, finished files are kept"
            if full
            else "check owner, mode and mount of the directory",
        )
        raise ApplianceError(ExitCode.CONTAINER, fault) from error


def sync_directory(path: Path) -> None:
    """Flush a directory's names to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _header_bytes(specs: Sequence[TensorSpec]) -> tuple[bytes, int]:
    """Length field with the JSON header, padded to align the data, and the file's size."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in specs:
        offsets = [at, at + spec.nbytes]
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
        at += spec.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + at
