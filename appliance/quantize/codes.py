"""Keeps what calibration has made, layer by layer, until the output's files are written."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.checkpoint.tensors import open_tensors
from appliance.checkpoint.writer import ShardWriter, TensorSpec, storage_errors, write_json
from appliance.quantize.report import tensor_result

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from appliance.checkpoint.tensors import TensorReader
    from appliance.quantize.layout import Item
    from appliance.quantize.native import Encoded
    from appliance.quantize.report import TensorResult

_HIDDEN = "hidden"
_ERRORS = (OSError, ValueError, KeyError, TypeError, RecursionError)


class CalibratedCodes:
    """One directory with codes, results and the activations that the next layer starts from.

    A layer is finished when the activations behind it are written; they replace those before it.
    """

    def __init__(self, directory: Path) -> None:
        """Open or create the directory."""
        self._directory = directory
        self._readers: dict[int, TensorReader] = {}
        self._results: dict[str, tuple[int, TensorResult]] = {}
        with storage_errors(directory):
            directory.mkdir(exist_ok=True)

    def finished(self) -> int:
        """Number of layers, from the first, that earlier runs have finished."""
        layer = 0
        while self._load(layer):
            layer += 1
        while layer and not self._hidden(layer).is_file():
            layer -= 1
        return layer

    def hidden(self, layer: int) -> NDArray[np.float32]:
        """Activations before a layer, [tokens, H], as `save_hidden` kept them."""
        with open_tensors(self._hidden(layer).parent) as reader:
            return np.array(reader.array(_HIDDEN))

    def save(self, layer: int, made: Mapping[str, tuple[Encoded, TensorResult]]) -> None:
        """Keep the codes of a layer's matrices.

        Raises:
            ApplianceError: DISK_FULL or OUTPUT_UNWRITABLE, exit 12.
        """
        arrays: dict[str, NDArray[Any]] = {}
        for module, (encoded, _) in made.items():
            arrays[f"{module}.packed"] = encoded.packed
            arrays[f"{module}.scales"] = encoded.scales
        root = self._directory / f"layer-{layer:05d}"
        with storage_errors(root):
            root.mkdir(exist_ok=True)
        _write(root / "model.safetensors", arrays, "U8")
        write_json(root / "results.json", [asdict(result) for _, result in made.values()])

    def save_hidden(self, layer: int, hidden: NDArray[np.float32]) -> None:
        """Keep the activations before a layer and drop those before the one in front of it.

        Raises:
            ApplianceError: DISK_FULL or OUTPUT_UNWRITABLE, exit 12.
        """
        path = self._hidden(layer)
        with storage_errors(path):
            path.parent.mkdir(exist_ok=True)
        _write(path, {_HIDDEN: hidden}, "F32")
        with storage_errors(path):
            self._hidden(layer - 1).unlink(missing_ok=True)

    def load(self, layers: int) -> tuple[TensorResult, ...]:
        """Read the results of finished layers, after which `matrix` knows them."""
        for layer in range(layers):
            for result in self._load(layer) or ():
                self._results[result.name] = (layer, result)
        return tuple(result for _, result in self._results.values())

    def matrix(self, item: Item) -> tuple[tuple[NDArray[Any], ...], TensorResult]:
        """Codes, scales and divisor of one matrix, and what it lost."""
        layer, result = self._results[item.module]
        if layer not in self._readers:
            self._readers = {layer: open_tensors(self._directory / f"layer-{layer:05d}")}
        reader = self._readers[layer]
        divisor = np.array([result.divisor], np.float32)
        packed, codes = (reader.array(f"{item.module}.{kind}") for kind in ("packed", "scales"))
        return (packed, codes, divisor), result

    def _hidden(self, layer: int) -> Path:
        return self._directory / f"{_HIDDEN}-{layer:05d}" / "model.safetensors"

    def _load(self, layer: int) -> tuple[TensorResult, ...] | None:
        path = self._directory / f"layer-{layer:05d}" / "results.json"
        try:
            return tuple(tensor_result(stored) for stored in json.loads(path.read_bytes()))
        except _ERRORS:
            return None


def _write(path: Path, arrays: Mapping[str, NDArray[Any]], dtype: str) -> None:
    specs = [TensorSpec(name, dtype, array.shape) for name, array in arrays.items()]
    with ShardWriter(path, specs) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
