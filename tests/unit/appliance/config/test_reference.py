"""What is made from the schema: the JSON schema, the reference page, the commented default file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from appliance.config.describe import allowed_keys, default_at, entries, expected_at
from appliance.config.load import load_config
from appliance.config.reference import json_schema, reference_page
from appliance.config.schema import Config


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.fixture(scope="module")
def default_file(repository: Path) -> Path:
    return repository / "config/appliance.yaml"


def test_default_file_is_valid_and_states_every_default(default_file: Path) -> None:
    loaded = load_config(default_file)

    assert loaded.config == Config.model_validate(
        {"version": 1, "model": {"path": "/models/quasar"}}
    )
    assert loaded.warnings == ()


def test_default_file_states_every_key(default_file: Path) -> None:
    loaded = load_config(default_file)
    keys = {entry.key for entry in entries() if "[]" not in entry.key}

    assert keys == set(loaded.lines)


def test_default_file_satisfies_the_json_schema(
    default_file: Path, validator: Draft202012Validator
) -> None:
    # PyYAML's own reader is YAML 1.1; the file holds no word on which the two differ.
    document = yaml.safe_load(default_file.read_text())

    assert list(validator.iter_errors(document)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"unknown": 1},
        {"model": {}},
        {"memory": {"shm_size": 16}},
        {"memory": {"gpu_memory_utilization": 0.96}},
        {"server": {"port": 0}},
        {"parallel": {"gpus": [0, "GPU-1234"]}},
    ],
)
def test_json_schema_refuses_what_the_loader_refuses(
    change: dict[str, object], validator: Draft202012Validator
) -> None:
    document = {"version": 1, "model": {"path": "/m"}, **change}

    assert list(validator.iter_errors(document)) != []


def test_json_schema_defaults_are_spelled_with_units() -> None:
    schema = json_schema()
    memory = schema["$defs"]["MemorySection"]["properties"]

    assert memory["shm_size"]["default"] == "16GiB"
    assert "from 64MiB to 1024GiB" in memory["shm_size"]["description"]


def test_every_key_has_a_meaning_that_is_a_sentence() -> None:
    for entry in entries():
        assert entry.meaning.endswith("."), entry.key
        assert entry.meaning[0].isupper() or entry.meaning[0] == "`" or entry.meaning[:4] == "vLLM"


def test_every_key_is_on_the_reference_page() -> None:
    page = reference_page()

    for entry in entries():
        if "." in entry.key and not entry.section:
            assert f"| `{entry.key.partition('.')[2]}` |" in page


def test_config_dump_reads_back_equal(tmp_path: Path) -> None:
    text = "version: 1\nmodel: {path: /m}\nmemory: {shm_size: 1536MiB}\nstartup: {timeout: 90s}\n"
    first = tmp_path / "a.yaml"
    first.write_text(text)
    loaded = load_config(first)
    second = tmp_path / "b.yaml"
    second.write_text(json.dumps(loaded.config.model_dump(mode="json")))

    assert load_config(second).config == loaded.config


def test_describe_unknown_path_expects_text_and_allows_nothing() -> None:
    assert allowed_keys("no.such.path") is None
    assert expected_at("no.such.path") == "text"
    assert default_at("no.such.path") is None


def test_describe_item_of_a_list_knows_its_keys() -> None:
    assert "until" in (allowed_keys("gate.overrides[3]") or ())
    assert expected_at("gate.overrides[3].reason") == "text of at least 8 characters"
