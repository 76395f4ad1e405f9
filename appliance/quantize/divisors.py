"""The global scale of every fused site: that of the largest weight of all its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.checkpoint.values import LARGEST_WEIGHT
from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.quantize.native import divisor_of, scan

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np

    from appliance.checkpoint.tensors import TensorReader
    from appliance.quantize.layout import Item
    from appliance.quantize.sites import Site


class Divisors:
    """Computes and remembers the divisor of every site that is asked for."""

    def __init__(self, reader: TensorReader, modules: Mapping[str, Item], *, threads: int) -> None:
        """Keep the source and its quantized items by module."""
        self._reader = reader
        self._modules = modules
        self._threads = threads
        self._known: dict[str, np.float32] = {}

    def of(self, site: Site, shard: str) -> np.float32:
        """Return the divisor of a site; pages of files other than `shard` are given back.

        Raises:
            ApplianceError: QUANT_NOT_FINITE, exit 31; QUANT_WEIGHT_RANGE, exit 30.
        """
        if site.name not in self._known:
            amax = max(self._amax(shard, self._modules[part]) for part in site.parts)
            self._known[site.name] = divisor_of(amax)
        return self._known[site.name]

    def _amax(self, shard: str, item: Item) -> float:
        entry = item.entry
        found = scan(item.view(self._reader.array(entry.name)), entry.dtype, threads=self._threads)
        if entry.shard != shard:
            self._reader.release(entry.name)
        if found.non_finite:
            raise not_finite(self._reader.root / entry.shard, item.module, found.non_finite)
        require_range(self._reader.root / entry.shard, item.module, found.amax)
        return found.amax


def require_range(path: Path, name: str, amax: float) -> None:
    """Refuse weights that every reader of the output would take for a global stored upside down.

    Raises:
        ApplianceError: QUANT_WEIGHT_RANGE, exit 30.
    """
    if amax > LARGEST_WEIGHT:
        fault = Fault(
            "QUANT_WEIGHT_RANGE",
            f"{path} {name}",
            f"no weight beyond {LARGEST_WEIGHT:g}, the most that is served from 4 bits",
            f"magnitude {amax:.6g}",
            "use another checkpoint: trained weights stay far below",
        )
        raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)


def not_finite(path: Path, name: str, count: int) -> ApplianceError:
    """Make the error of a matrix with NaN or infinite weights."""
    fault = Fault(
        "QUANT_NOT_FINITE",
        f"{path} {name}",
        "every weight is finite",
        f"{count} NaN or infinite weights",
        "download the checkpoint again or use another one",
    )
    return ApplianceError(ExitCode.CHECKPOINT_CORRUPT, fault)
