"""Opens what is to be converted, safetensors directory or QUASAR container, tensor by tensor."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.checkpoint.container import check_payload, is_container
from appliance.checkpoint.container_arrays import ContainerReader
from appliance.checkpoint.decode import Matrix, open_matrix
from appliance.checkpoint.legacy import find_container, open_container
from appliance.checkpoint.notes import overruled
from appliance.checkpoint.read import read_checkpoint
from appliance.checkpoint.rules import Lenient
from appliance.checkpoint.shapes import model_shapes, turned_modules
from appliance.checkpoint.stored import find_stored
from appliance.checkpoint.tensors import open_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from numpy.typing import NDArray

    from appliance.checkpoint.container import ContainerTensor
    from appliance.checkpoint.stored import Stored
    from appliance.checkpoint.tensors import TensorReader


@dataclass(frozen=True)
class QuantizedPiece:
    """A quantized matrix.

    Attributes:
        module: Its name.
        open: Views it; nothing of it is in memory before.
        release: Gives the memory of its pages back.
    """

    module: str
    open: Callable[[], Matrix]
    release: Callable[[], None]


@dataclass(frozen=True)
class DensePiece:
    """A tensor that stays as it is.

    Attributes:
        name: Its name.
        dtype: safetensors type name.
        shape: Lengths of its axes.
        array: Views it, BF16 as the unsigned integer of its width.
        release: Gives the memory of its pages back.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    array: Callable[[], NDArray[Any]]
    release: Callable[[], None]


@dataclass(frozen=True)
class Source:
    """Everything that is converted.

    Attributes:
        path: As the user named it.
        directory: Where config.json and tokenizer lie.
        files: The files that hold tensors.
        quantized: Quantized matrices.
        dense: All other tensors.
        dropped: Tensors that nothing reads and no target keeps: scales of activations and caches.
        notes: `W_` codes with their sentence.
    """

    path: Path
    directory: Path
    files: tuple[Path, ...]
    quantized: tuple[QuantizedPiece, ...]
    dense: tuple[DensePiece, ...]
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def open_source(path: Path, lenient: Lenient = Lenient.NONE) -> Generator[Source]:
    """Open a checkpoint by its headers.

    Args:
        path: Directory with safetensors or a container, or a container's file.
        lenient: What is done with modules that are excluded and packed all the same.

    Raises:
        ApplianceError: What `read_checkpoint`, `open_container` or `check_payload` raises.
    """
    if is_container(path) or path.is_file() or (path.is_dir() and find_container(path)):
        yield _container(path)
        return
    with open_tensors(path) as reader:
        yield _directory(path, reader, lenient)


def _directory(path: Path, reader: TensorReader, lenient: Lenient) -> Source:
    checkpoint = read_checkpoint(path, lenient)
    shapes, turned = model_shapes(checkpoint), turned_modules(checkpoint)
    forms = {name: (reader.entry(name).dtype, reader.entry(name).shape) for name in reader.names()}
    matrices, others = find_stored(forms)
    taken = {
        name for each in matrices for name in (each.codes, each.scales, each.factor) if name
    } | set(others)
    return Source(
        path,
        path,
        tuple(path / shard for shard in reader.shards),
        tuple(
            _stored(reader, each, shapes.get(each.module), is_turned=each.module in turned)
            for each in matrices
        ),
        tuple(_tensor(reader, name) for name in others),
        tuple(sorted(set(forms) - taken)),
        overruled(checkpoint.verdict),
    )


def _stored(
    reader: TensorReader, stored: Stored, shape: tuple[int, ...] | None, *, is_turned: bool
) -> QuantizedPiece:
    def release() -> None:
        for name in (stored.codes, stored.scales):
            reader.release(name)

    def matrix() -> Matrix:
        return open_matrix(reader, stored, shape, is_turned=is_turned)

    return QuantizedPiece(stored.module, matrix, release)


def _tensor(reader: TensorReader, name: str) -> DensePiece:
    entry = reader.entry(name)
    return DensePiece(
        name,
        entry.dtype,
        entry.shape,
        lambda: reader.array(name),
        lambda: reader.release(name),
    )


def _container(path: Path) -> Source:
    container = open_container(path)
    check_payload(container)
    reader = ContainerReader(container)
    parts = {part for tensor in container.tensors for part in tensor.segments}
    files = sorted({container.file_of(part) for part in parts})
    return Source(
        path,
        container.path.parent,
        tuple(files),
        tuple(_matrix(reader, tensor) for tensor in container.tensors if not tensor.is_dense),
        tuple(_data(reader, tensor) for tensor in container.tensors if tensor.is_dense),
    )


def _matrix(reader: ContainerReader, tensor: ContainerTensor) -> QuantizedPiece:
    return QuantizedPiece(tensor.name, lambda: reader.matrix(tensor), _nothing)


def _data(reader: ContainerReader, tensor: ContainerTensor) -> DensePiece:
    dtype = tensor.segments["data"].dtype
    return DensePiece(
        tensor.name, dtype, tensor.shape, lambda: reader.array(tensor, "data"), _nothing
    )


def _nothing() -> None:
    """Pages of a container are dropped by the kernel when it needs them."""
