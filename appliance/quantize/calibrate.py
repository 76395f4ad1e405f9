"""Mode `calibrated`: quantizes a model layer by layer with the activations of a text."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.checkpoint.writer import require_room
from appliance.quantize.activations import LayerWalk, read_windows, unfit
from appliance.quantize.codes import CalibratedCodes
from appliance.quantize.divisors import Divisors
from appliance.quantize.encode import result_of
from appliance.quantize.gptq import Moments, calibrate, order_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from appliance.checkpoint.tensors import TensorReader
    from appliance.quantize.layout import Item, Layout
    from appliance.quantize.native import Encoded
    from appliance.quantize.report import TensorResult
    from appliance.quantize.settings import Calibration
    from appliance.quantize.sites import Site


@dataclass(frozen=True)
class LayerDone:
    """A finished layer.

    Attributes:
        number: From 1.
        layers: Layers in all.
        seconds: Wall time it took.
        results: What became of its matrices.
    """

    number: int
    layers: int
    seconds: float
    results: tuple[TensorResult, ...]


def calibrate_layers(
    reader: TensorReader,
    layout: Layout,
    directory: Path,
    *,
    calibration: Calibration,
    threads: int,
    tell: Callable[[LayerDone], None],
) -> CalibratedCodes:
    """Make the codes of every matrix, or go on with what an earlier run has made.

    Args:
        reader: The opened source.
        layout: What becomes of its tensors.
        directory: Where codes and activations are kept.
        calibration: The text.
        threads: Threads of the encoder.
        tell: Called after each layer.

    Raises:
        ApplianceError: QUANT_CALIBRATION (exit 2), QUANT_NOT_FINITE (exit 31), DISK_FULL (exit 12),
            E_TOKENIZER_MISSING (exit 30).
    """
    codes = CalibratedCodes(directory)
    windows = read_windows(reader.root, calibration)
    walk = LayerWalk(reader, windows)
    first = codes.finished()
    if first < len(walk):
        hidden = codes.hidden(first) if first else walk.embed()
        require_room(directory, layout.weights * 5 // 8 + 2 * hidden.nbytes)
        worker = _Worker(reader, layout.modules, threads)
        for layer in range(first, len(walk)):
            begun = time.monotonic()
            parts = _matrices_of(walk.modules(layer), layout.modules)
            inputs = {
                site.name: site.parts[0].removeprefix(walk.modules(layer))
                for site, _ in parts.values()
            }
            moments = walk.run(layer, hidden, inputs)
            made = worker.layer(parts, moments)
            codes.save(layer, made)
            codes.save_hidden(layer + 1, hidden)
            results = tuple(result for _, result in made.values())
            tell(LayerDone(layer + 1, len(walk), time.monotonic() - begun, results))
    codes.load(len(walk))
    return codes


class _Worker:
    """Quantizes the matrices of a layer."""

    def __init__(self, reader: TensorReader, modules: Mapping[str, Item], threads: int) -> None:
        self._reader = reader
        self._threads = threads
        self._divisors = Divisors(reader, modules, threads=threads)

    def layer(
        self, parts: Mapping[str, tuple[Site, Item]], moments: dict[str, Moments]
    ) -> dict[str, tuple[Encoded, TensorResult]]:
        """Quantize site by site; the moments of a site are dropped when it is done."""
        made: dict[str, tuple[Encoded, TensorResult]] = {}
        for name in dict.fromkeys(site.name for site, _ in parts.values()):
            mine = {module: part for module, part in parts.items() if part[0].name == name}
            own = moments.pop(name, None) or _unseen(next(iter(mine.values()))[1])
            divisors = {
                module: self._divisors.of(site, item.entry.shard)
                for module, (site, item) in mine.items()
            }
            if not (math.isfinite(own.calibration.sum()) and math.isfinite(own.held_out.sum())):
                raise unfit(name, "finite activations", "NaN or infinite ones")
            order = order_of(own.calibration)
            is_judged = bool(own.held_out.any())
            for module, (site, item) in mine.items():
                divisor = divisors[module]
                weights = item.float32(self._reader)
                self._reader.release(item.entry.name)
                done = calibrate(weights, order, own, divisor=divisor, threads=self._threads)
                result = result_of(
                    item,
                    site,
                    done.encoded,
                    divisor=divisor,
                    output_error=done.output_error if is_judged else None,
                    output_error_rtn=done.output_error_rtn if is_judged else None,
                )
                made[module] = (done.encoded, result)
        return made


def _unseen(item: Item) -> Moments:
    """Make the moments of an expert that no token has reached: its weights decide alone."""
    empty = torch.zeros(item.shape[1], item.shape[1])
    return Moments(empty, empty)


def _matrices_of(prefix: str, modules: Mapping[str, Item]) -> dict[str, tuple[Site, Item]]:
    """The quantized matrices of one layer, by module name."""
    return {
        name: (item.site, item)
        for name, item in modules.items()
        if item.site is not None and name.startswith(prefix)
    }
