"""Shared by the tests of reported faults: one command line, a model of headers only, a service."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from commands import Ended, run_command
from modules import module_at

REPOSITORY = Path(__file__).parents[2]
_SERVICE = module_at(REPOSITORY / "tests/e2e/conftest.py")
start, fake_python, tiny_checkpoint = (
    _SERVICE.start,
    _SERVICE.fake_python,
    _SERVICE.tiny_checkpoint,
)
serve = module_at(REPOSITORY / "tests/unit/appliance/quality/conftest.py").serve
HOLLOW = module_at(REPOSITORY / "tests/machines/hollow.py")

SMALL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def appliance(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run one verb."""

    return partial(run_command, capsys)


@pytest.fixture(scope="session")
def hollow() -> ModuleType:
    """What writes checkpoints of headers only."""
    return HOLLOW


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """Write a quantized checkpoint: `SMALL` with changes, and other metadata or tensors."""

    def write(
        *, tensors: Callable[[dict[str, Any]], Any] | None = None, extra: Any = None, **changes: Any
    ) -> Path:
        config = SMALL | changes
        found = HOLLOW.quantized(HOLLOW.model(config)) if tensors is None else tensors(config)
        whole = HOLLOW.compressed(config) if extra is None else config | extra
        return HOLLOW.write(tmp_path / "model", whole, found)

    return write


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    """Write a configuration; sections are given by name. JSON is YAML."""

    def write(path: Path | str = "/models/m", **sections: Any) -> Path:
        written = tmp_path / "appliance.yaml"
        model = {"path": str(path), **sections.pop("model", {})}
        written.write_text(json.dumps({"version": 1, "model": model, **sections}))
        return written

    return write


@pytest.fixture
def validate(appliance: Callable[..., Ended], file: Callable[..., Path]) -> Callable[..., Ended]:
    """Validate a checkpoint with sections of a configuration."""

    def run(path: Path, assume: str = "2x16GiB", *words: str, **sections: Any) -> Ended:
        return appliance("validate", "--config", file(path, **sections), "--assume", assume, *words)

    return run
