"""Small checkpoints to break, and the place of the handed vectors."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from modules import module_at

REPOSITORY = Path(__file__).parents[4]
VECTORS = REPOSITORY.parent / "shared" / "vectors"


HOLLOW = module_at(REPOSITORY / "tests" / "machines" / "hollow.py")

TINY: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
TINY_MOE = TINY | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


class Tiny:
    """A small quantized checkpoint whose configuration and tensors a test may change first."""

    def __init__(self, root: Path, config: dict[str, object]) -> None:
        self.root = root
        self.config = HOLLOW.compressed(copy.deepcopy(config))
        self.tensors = HOLLOW.quantized(HOLLOW.model(config))

    @property
    def quantization(self) -> dict[str, object]:
        return self.config["quantization_config"]

    def make_dense(self, module: str) -> None:
        _, (rows, half) = self.tensors.pop(f"{module}.weight_packed")
        for part in ("weight_scale", "weight_global_scale"):
            del self.tensors[f"{module}.{part}"]
        self.tensors[f"{module}.weight"] = ("BF16", (rows, half * 2))

    def make_fp8(self, module: str) -> None:
        self.make_dense(module)
        _, shape = self.tensors[f"{module}.weight"]
        self.tensors[f"{module}.weight"] = ("F8_E4M3", shape)
        self.tensors[f"{module}.weight_scale"] = ("F32", ())

    def as_modelopt(self, **fields: object) -> None:
        names = {"weight_packed": "weight", "weight_global_scale": "weight_scale_2"}
        renamed = {}
        for name, entry in self.tensors.items():
            module, _, part = name.rpartition(".")
            renamed[f"{module}.{names.get(part, part)}"] = entry
        self.tensors = renamed
        block = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
        self.config["quantization_config"] = block | fields

    def write(self, *, shards: int = 2) -> Path:
        return HOLLOW.write(self.root, self.config, self.tensors, shards=shards)


@pytest.fixture
def hollow() -> ModuleType:
    return HOLLOW


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path / "tiny", TINY)


@pytest.fixture
def tiny_moe(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path / "moe", TINY_MOE)


@pytest.fixture
def tiny_of(tmp_path: Path) -> Callable[[dict[str, object]], Tiny]:
    return lambda changes: Tiny(tmp_path / "changed", TINY | changes)


def manifest() -> list[dict[str, object]]:
    """Return the mini checkpoints of the handed vectors, none where they are not."""
    path = VECTORS / "MANIFEST.json"
    return json.loads(path.read_text())["checkpoints"] if path.exists() else []


@pytest.fixture
def vectors() -> Path:
    if not VECTORS.exists():
        pytest.skip("no shared folder")
    return VECTORS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `vector` every mini checkpoint of the handed vectors."""
    if "vector" in metafunc.fixturenames:
        found = manifest()
        metafunc.parametrize("vector", found, ids=[str(each["name"]) for each in found])
