"""Configurations, summaries and hosts to plan with."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from modules import module_at
from planning import Configure, Public, Tiny

from appliance.checkpoint.read import summarize
from appliance.checkpoint.summary import CheckpointSummary
from appliance.config.load import LoadedConfig, load_config

REPOSITORY = Path(__file__).parents[4]


HOLLOW = module_at(REPOSITORY / "tests" / "machines" / "hollow.py")

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
def tiny(tmp_path: Path) -> Tiny:
    """Return a function from changes of `TINY` to the summary of a quantized checkpoint."""

    def make(**changes: object) -> CheckpointSummary:
        config = TINY | changes
        made = HOLLOW.model(config)
        root = HOLLOW.write(tmp_path / "tiny", HOLLOW.compressed(config), HOLLOW.quantized(made))
        return summarize(root)

    return make


@pytest.fixture(scope="session")
def public(tmp_path_factory: pytest.TempPathFactory) -> Public:
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
    return module_at(REPOSITORY / "tests" / "golden" / "plan" / "cases.py")
