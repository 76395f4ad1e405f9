"""The arrays of a QUASAR container as numpy views, quantized matrices ready to be decoded."""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.checkpoint.decode import Matrix
from appliance.checkpoint.faults import refuse
from appliance.checkpoint.stored import Layout, Stored

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from appliance.checkpoint.container import Container, ContainerTensor

_TYPES: Mapping[str, np.dtype[Any]] = {
    "U32": np.dtype("<u4"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F8_E4M3": np.dtype(np.uint8),
    "BF16": np.dtype("<u2"),
    "U8": np.dtype(np.uint8),
}


class ContainerReader:
    """Views on the segments of one container; files are mapped once."""

    def __init__(self, container: Container) -> None:
        """Keep what `read_container` or `open_container` said of the file."""
        self.container = container
        self._maps: dict[Path, mmap.mmap] = {}

    def array(self, tensor: ContainerTensor, part: str) -> NDArray[Any]:
        """View one segment: BF16 and E4M3 as the unsigned integers of their width.

        Raises:
            ApplianceError: E_UNREADABLE or E_TRUNCATED if the file changed since.
        """
        segment = tensor.segments[part]
        kind, count = _TYPES[segment.dtype], math.prod(segment.shape)
        if count == 0:
            return np.empty(segment.shape, kind)
        mapped = self._map(self.container.file_of(part), segment.end)
        return np.frombuffer(mapped, kind, count, segment.begin).reshape(segment.shape)

    def matrix(self, tensor: ContainerTensor) -> Matrix:
        """View one quantized matrix, ready to be decoded."""
        codes = self.array(tensor, "qweight").view(np.uint8)
        factors = None
        if "global" in tensor.segments:
            factors = self.array(tensor, "global").reshape(-1).astype(np.float32)
        stored = Stored(
            tensor.name,
            Layout.QUASAR,
            f"{tensor.name}.qweight",
            f"{tensor.name}.scales",
            f"{tensor.name}.global" if factors is not None else None,
        )
        is_offset = tensor.codebook == "int4_offset8"
        scales = self.array(tensor, "scales")
        return Matrix(stored, codes, scales, factors, tensor.shape[1], is_offset)

    def _map(self, path: Path, wanted: int) -> mmap.mmap:
        if path not in self._maps:
            fix = "leave the file alone while it is read; run again"
            try:
                with path.open("rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise refuse("E_UNREADABLE", str(path), "a container", str(error), fix) from None
        mapped = self._maps[path]
        if len(mapped) < wanted:
            value = f"a file of {len(mapped)} bytes"
            raise refuse("E_TRUNCATED", str(path), f"{wanted} bytes", value, "run again")
        return mapped
