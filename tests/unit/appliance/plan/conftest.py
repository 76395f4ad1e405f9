"""Configurations, summaries and hosts to plan with."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from appliance.checkpoint.read import summarize
from appliance.checkpoint.summary import CheckpointSummary
from appliance.config.load import LoadedConfig, load_config

REPOSITORY = Path(__file__).parents[4]
Configure = Callable[..., LoadedConfig]


def load(name: str, path: Path) -> ModuleType:
    """Return a module of the tests by its file, once."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


HOLLOW = load("tests_machines_hollow", REPOSITORY / "tests" / "machines" / "hollow.py")

TINY: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


@pytest.fixture
def hollow() -> ModuleType:
    return HOLLOW


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """Return a function from sections to a loaded configuration."""

    def make(**sections: dict[str, object]) -> LoadedConfig:
        path = tmp_path / "appliance.yaml"
        model = {"path": "/models/tiny"} | sections.pop("model", {})
        # JSON is YAML.
        path.write_text(json.dumps({"version": 1, "model": model, **sections}))
        return load_config(path)

    return make


@pytest.fixture
def on_cpu(configure: Configure) -> Configure:
    """Return the same for the CPU engine."""

    def make(**sections: dict[str, object]) -> LoadedConfig:
        execution = {"device": "cpu"} | sections.pop("execution", {})
        return configure(execution=execution, **sections)

    return make


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., CheckpointSummary]:
    """Return a function from changes of `TINY` to the summary of a quantized checkpoint."""

    def make(**changes: object) -> CheckpointSummary:
        config = TINY | changes
        made = HOLLOW.model(config)
        root = HOLLOW.write(tmp_path / "tiny", HOLLOW.compressed(config), HOLLOW.quantized(made))
        return summarize(root)

    return make


@pytest.fixture(scope="session")
def public(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], CheckpointSummary]:
    """Return a function from a public model's name to its summary, written and read once."""
    root, known = tmp_path_factory.mktemp("public"), dict[str, CheckpointSummary]()

    def make(name: str) -> CheckpointSummary:
        if name not in known:
            known[name] = summarize(HOLLOW.build(root, name))
        return known[name]

    return make


@pytest.fixture(scope="session")
def golden_plans() -> ModuleType:
    """tests/golden/plan/cases.py."""
    return load("golden_plan_cases", REPOSITORY / "tests" / "golden" / "plan" / "cases.py")
