"""The identity of a checkpoint's weights: SHA-256 of canonical values, whatever layout holds them.

A quantized matrix is hashed as the C-order little-endian FP32 bytes of its dequantization [N, K],
padding removed and -0.0 kept; a stack of experts as it is stored. Dense tensors are hashed as their
bytes, type and shape apart.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.checkpoint.container import check_payload
from appliance.checkpoint.container_arrays import ContainerReader
from appliance.checkpoint.decode import Matrix, open_matrix
from appliance.checkpoint.legacy import is_quasar, open_container
from appliance.checkpoint.notes import overruled
from appliance.checkpoint.read import read_checkpoint
from appliance.checkpoint.rules import Lenient
from appliance.checkpoint.shapes import model_shapes, turned_modules
from appliance.checkpoint.stored import Layout, find_stored
from appliance.checkpoint.tensors import open_tensors
from appliance.checkpoint.tied import check_tied

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

_CHUNK = 1 << 24


@dataclass(frozen=True)
class Fingerprint:
    """What one module or dense tensor is.

    Attributes:
        form: `nvfp4`, `fp8` or the type name of a dense tensor.
        shape: Shape of the values.
        sha256: Of the canonical values, in hex.
        total: Sum of the values in FP64; 0 for a dense tensor.
    """

    form: str
    shape: tuple[int, ...]
    sha256: str
    total: float = 0.0


@dataclass(frozen=True)
class Identity:
    """What the weights are.

    Attributes:
        modules: Quantized modules by name.
        dense: Other tensors by name.
        notes: `W_` codes with their sentence.
    """

    modules: Mapping[str, Fingerprint]
    dense: Mapping[str, Fingerprint]
    notes: tuple[str, ...] = ()

    @property
    def weights_sha256(self) -> str:
        """SHA-256 over names, shapes and digests of the quantized modules, sorted by name."""
        digest = hashlib.sha256()
        for name, found in sorted(self.modules.items()):
            digest.update(f"{name}\0{list(found.shape)}\0{found.sha256}\n".encode())
        return digest.hexdigest()


def identify(path: Path, index: Path | None = None, *, lenient: Lenient = Lenient.NONE) -> Identity:
    """Hash every tensor of a checkpoint directory or of a QUASAR container.

    Args:
        path: Directory or file.
        index: `quasar_index.json` of a legacy container; None looks beside it.
        lenient: What is done with modules that are excluded and packed all the same.

    Raises:
        ApplianceError: What `summarize` or `open_container` raises, and E_SCALE_NAN,
            E_SCALE_NEGATIVE, E_GLOBAL_INVALID or E_GLOBAL_DIRECTION for values.
    """
    if path.is_file() or is_quasar(path):
        return _identify_container(path, index)
    return _identify_directory(path, lenient)


def _identify_directory(path: Path, lenient: Lenient) -> Identity:
    checkpoint = read_checkpoint(path, lenient)
    check_tied(checkpoint.config, checkpoint.shards)
    shapes, turned = model_shapes(checkpoint), turned_modules(checkpoint)
    modules: dict[str, Fingerprint] = {}
    dense: dict[str, Fingerprint] = {}
    zeros: list[str] = []
    with open_tensors(path) as reader:
        forms = {
            name: (reader.entry(name).dtype, reader.entry(name).shape) for name in reader.names()
        }
        matrices, others = find_stored(forms)
        for stored in matrices:
            shape, is_turned = shapes.get(stored.module), stored.module in turned
            matrix = open_matrix(reader, stored, shape, is_turned=is_turned)
            modules[stored.module] = _fingerprint(matrix)
            if matrix.zeros:
                zeros.append(stored.module)
            for name in (stored.codes, stored.scales):
                reader.release(name)
        for name in others:
            entry = reader.entry(name)
            sha256 = _hash(reader.array(name))
            dense[name] = Fingerprint(entry.dtype, entry.shape, sha256)
            reader.release(name)
    return Identity(modules, dense, (*overruled(checkpoint.verdict), *_notes(zeros)))


def _identify_container(path: Path, index: Path | None) -> Identity:
    container = open_container(path, index)
    check_payload(container)
    reader = ContainerReader(container)
    modules: dict[str, Fingerprint] = {}
    dense: dict[str, Fingerprint] = {}
    for tensor in container.tensors:
        if tensor.is_dense:
            dtype = tensor.segments["data"].dtype
            sha256 = _hash(reader.array(tensor, "data"))
            dense[tensor.name] = Fingerprint(dtype, tensor.shape, sha256)
        else:
            modules[tensor.name] = _fingerprint(reader.matrix(tensor))
    return Identity(modules, dense)


def _notes(zeros: list[str]) -> tuple[str, ...]:
    if not zeros:
        return ()
    names = ", ".join(zeros[:3])
    return (f"W_ZERO_TENSOR: all zero as their producer stores it: {names} ({len(zeros)})",)


def _fingerprint(matrix: Matrix) -> Fingerprint:
    digest, total = hashlib.sha256(), 0.0
    for slab in matrix.slabs():
        digest.update(np.ascontiguousarray(slab, dtype="<f4").data)
        total += float(slab.sum(dtype=np.float64))
    form = "fp8" if matrix.stored.layout is Layout.FP8 else "nvfp4"
    return Fingerprint(form, matrix.shape, digest.hexdigest(), total)


def _hash(array: NDArray[Any]) -> str:
    digest = hashlib.sha256()
    flat = array.reshape(-1).view(np.uint8)
    for begin in range(0, len(flat), _CHUNK):
        digest.update(flat[begin : begin + _CHUNK].data)
    return digest.hexdigest()
