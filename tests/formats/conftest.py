"""The handed vectors: every entry of their manifest becomes a parameter, none is left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.checkpoint.header import read_header
from appliance.checkpoint.read import summarize
from appliance.checkpoint.tensors import TensorEntry, TensorReader, open_tensors
from appliance.checkpoint.writer import ShardWriter, TensorSpec
from appliance.errors import ApplianceError

REPOSITORY = Path(__file__).parents[2]
VECTORS = REPOSITORY.parent / "shared" / "vectors"


def manifest(section: str) -> list[dict[str, Any]]:
    """Return one section of the manifest, nothing where the vectors are not."""
    path = VECTORS / "MANIFEST.json"
    return json.loads(path.read_text())[section] if path.exists() else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `case`, `checkpoint` and `container` every entry of their section."""
    for fixture, section, key in (
        ("case", "cases", "name"),
        ("checkpoint", "checkpoints", "name"),
        ("container", "containers", "file"),
    ):
        if fixture in metafunc.fixturenames:
            found = manifest(section)
            ids = [str(entry[key]).rpartition("/")[2] for entry in found]
            metafunc.parametrize(fixture, found, ids=ids)


@pytest.fixture
def vectors() -> Path:
    if not VECTORS.exists():
        pytest.skip("no shared folder")
    return VECTORS


@pytest.fixture(scope="session")
def single_file() -> Callable[[Path], TensorReader]:
    """Read one safetensors file that belongs to no checkpoint."""

    def read(path: Path) -> TensorReader:
        header = read_header(path)
        entries = [
            TensorEntry(name, stored.dtype, stored.shape, path.name, stored.begin, stored.end)
            for name, stored in header.tensors.items()
        ]
        return TensorReader(path.parent, entries, [path.name])

    return read


class Editable:
    """A mini checkpoint in memory, to be changed and written as another."""

    def __init__(self, source: Path, target: Path) -> None:
        self.root = target
        self.config: dict[str, Any] = json.loads((source / "config.json").read_text())
        legacy = source / "hf_quant_config.json"
        self.legacy: dict[str, Any] | None = (
            json.loads(legacy.read_text()) if legacy.exists() else None
        )
        with open_tensors(source) as reader:
            self.tensors: dict[str, tuple[str, np.ndarray]] = {
                name: (reader.entry(name).dtype, reader.array(name).copy())
                for name in reader.names()
            }

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config["quantization_config"]

    def exclude(self, *modules: str) -> None:
        """Add to every exclude list."""
        self.quantization.setdefault("ignore", []).extend(modules)
        if self.legacy is not None:
            self.legacy["quantization"].setdefault("exclude_modules", []).extend(modules)

    def drop(self, module: str) -> dict[str, tuple[str, np.ndarray]]:
        """Take every tensor of a module out."""
        names = [name for name in self.tensors if name.startswith(f"{module}.")]
        return {name: self.tensors.pop(name) for name in names}

    def dense(self, module: str, rows: int, columns: int) -> None:
        """Store one module as BF16 zeros."""
        self.drop(module)
        self.tensors[f"{module}.weight"] = ("BF16", np.zeros((rows, columns), np.uint16))

    def write(self) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        specs = [TensorSpec(name, kind, each.shape) for name, (kind, each) in self.tensors.items()]
        with ShardWriter(self.root / "model.safetensors", specs) as writer:
            for name, (_, array) in self.tensors.items():
                writer.write(name, array)
        (self.root / "config.json").write_text(json.dumps(self.config))
        if self.legacy is not None:
            (self.root / "hf_quant_config.json").write_text(json.dumps(self.legacy))
        return self.root


@pytest.fixture
def edit(vectors: Path, tmp_path: Path) -> Callable[[str], Editable]:
    """Open a copy of one mini checkpoint by its name."""
    return lambda name: Editable(vectors / "ckpt" / name, tmp_path / f"edited_{name}")


def refusal(root: Path) -> list[str]:
    """Return the codes that a checkpoint is refused with, none if it is not."""
    try:
        summarize(root)
    except ApplianceError as error:
        return sorted({fault.code for fault in error.faults})
    return []


@pytest.fixture
def codes() -> Callable[[Path], list[str]]:
    return refusal
