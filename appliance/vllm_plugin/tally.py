"""Counts what the loaded layers of this process hold, and says so when the last is ready."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_LOG = logging.getLogger("vllm.nvfp4")


@dataclass
class Tally:
    """Bytes of the NVFP4 and FP8 layers of one rank.

    Attributes:
        expected: Layers that were created and will load.
        ready: Layers whose weights are in place.
        stored_bytes: Bytes of codes, scales and globals as loaded.
        held_bytes: Bytes of the weights that the products read from now on.
        zero: Names of matrices that a producer stored as all zero.
        differ: Fused layers, and experts, whose parts have globals of their own.
        overruled: Names of packed matrices that the config excludes; each once.
    """

    expected: int = 0
    ready: int = 0
    stored_bytes: int = 0
    held_bytes: int = 0
    zero: list[str] = field(default_factory=list)
    differ: int = 0
    overruled: dict[str, None] = field(default_factory=dict)

    def expect(self) -> None:
        """Count one layer that will load."""
        self.expected += 1

    def note_zero(self, name: str) -> None:
        """Note a matrix that its producer stored as all zero, such as a pruned expert."""
        self.zero.append(name)

    def note_overruled(self, names: Iterable[str]) -> None:
        """Note packed matrices that the config excludes and that are loaded all the same."""
        self.overruled |= dict.fromkeys(names)

    def note_globals(self, found: Iterable[float]) -> None:
        """Note whether the parts of one fused matrix have globals of their own."""
        self.differ += len(set(found)) > 1

    def add(self, stored_bytes: int, held_bytes: int) -> None:
        """Count one layer that is ready; the last one is followed by the summary line."""
        self.ready += 1
        self.stored_bytes += stored_bytes
        self.held_bytes += held_bytes
        if self.ready == self.expected:
            self._report()

    def _report(self) -> None:
        for name in list(self.overruled)[:4]:
            _LOG.warning(
                "nvfp4.tensors_win code=W_EXCLUDED_BUT_QUANTIZED name=%s count=%d",
                name,
                len(self.overruled),
            )
        for name in self.zero[:4]:
            _LOG.warning(
                "nvfp4.zero_tensor code=W_ZERO_TENSOR name=%s count=%d", name, len(self.zero)
            )
        if self.differ:
            _LOG.info("nvfp4.fused_globals code=I_FUSED_GLOBALS_DIFFER sites=%d", self.differ)
        _LOG.info(
            "nvfp4.weights layers=%d stored_bytes=%d bytes=%d",
            self.ready,
            self.stored_bytes,
            self.held_bytes,
        )
