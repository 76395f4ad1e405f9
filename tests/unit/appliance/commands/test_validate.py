"""`appliance validate`: one run says all that is wrong, and ends in the code of the contract."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
Configure = Callable[..., Path]


def test_validate_good_files_end_in_0_and_say_what_was_found(appliance: Run) -> None:
    ended = appliance("validate", "--assume", "2x16GiB")

    assert ended.code == 0
    assert "config/appliance.yaml: valid" in ended.out
    assert "LlamaForCausalLM, dense" in ended.out
    assert "plan           single, 1 ranks on cuda" in ended.out


def test_validate_json_holds_config_checkpoint_and_plan(appliance: Run, checkpoint: Path) -> None:
    ended = appliance("validate", "--assume", "2x16GiB", "--json")

    report = json.loads(ended.out)

    assert report["exit_code"] == 0
    assert report["checkpoint"]["path"] == str(checkpoint)
    assert report["checkpoint"]["files"] == 1
    assert report["plan"]["config_sha256"] == report["config"]["sha256"]
    assert report["plan"]["execution"]["dtype"] == "float16"


def test_validate_all_faults_of_the_file_at_once_exit_10(
    appliance: Run, configure: Configure
) -> None:
    configure("gate: {mode: maybe}\nserver: {port: 0}\nunknown: 1\n")

    ended = appliance("validate", "--assume", "2x16GiB")

    assert ended.code == 10
    assert ended.out == ""
    assert [line.split("]")[0] for line in ended.err.splitlines()] == [
        "error[CONFIG_VALUE",
        "error[CONFIG_VALUE",
        "error[CONFIG_UNKNOWN_KEY",
    ]


def test_validate_faults_of_file_and_named_checkpoint_at_once(
    appliance: Run, configure: Configure, tmp_path: Path
) -> None:
    configure("gate: {mode: maybe}\n")

    ended = appliance("validate", "--model", tmp_path / "absent", "--json")

    report = json.loads(ended.out)
    assert ended.code == report["exit_code"] == 10
    assert [fault["where"].split()[0] for fault in report["faults"]] == [
        "config/appliance.yaml:3",
        str(tmp_path / "absent"),
    ]


def test_validate_absent_checkpoint_exit_30(appliance: Run, tmp_path: Path) -> None:
    ended = appliance("validate", "--model", tmp_path / "absent", "--assume", "2x16GiB")

    assert ended.code == 30


def test_validate_truncated_checkpoint_exit_31(appliance: Run, checkpoint: Path) -> None:
    shard = checkpoint / "model.safetensors"
    with shard.open("r+b") as stream:
        stream.truncate(shard.stat().st_size - 1)

    ended = appliance("validate", "--assume", "2x16GiB")

    assert ended.code == 31


def test_validate_context_beyond_the_model_exit_10_with_its_line(
    appliance: Run, configure: Configure, checkpoint: Path
) -> None:
    path = configure("")
    path.write_text(f"version: 1\nmodel:\n  path: {checkpoint}\n  max_model_len: 4096\n")

    ended = appliance("validate", "--assume", "2x16GiB")

    assert ended.code == 10
    assert "config/appliance.yaml:4 model.max_model_len" in ended.err


def test_validate_schema_only_needs_no_checkpoint(appliance: Run, checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()

    ended = appliance("validate", "--schema-only")

    assert ended.code == 0
    assert "only the file was asked for" in ended.out


def test_validate_cpu_engine_needs_no_gpu(appliance: Run, configure: Configure) -> None:
    configure("execution: {device: cpu}\nmemory: {kv_cache_size: 1GiB}\n")

    ended = appliance("validate")

    assert ended.code == 0
    assert "on cpu" in ended.out


def test_validate_bypass_is_a_warning_on_stderr(appliance: Run, configure: Configure) -> None:
    configure("gate: {mode: off}\n")

    ended = appliance("validate", "--schema-only")

    assert ended.code == 0
    assert ended.err == (
        "warning config/appliance.yaml:3 gate.mode: the hardware is not checked at all\n"
    )


def test_validate_wrong_assumption_is_a_usage_error(appliance: Run) -> None:
    ended = appliance("validate", "--assume", "two cards")

    assert ended.code == 2
    assert "COUNTxSIZE" in ended.err


def test_validate_warning_of_file_and_plan_is_said_once(
    appliance: Run, configure: Configure
) -> None:
    configure("gate: {on_unknown: allow}\n")

    ended = appliance("validate", "--assume", "2x16GiB")

    assert ended.err.count("gate.on_unknown") == 1


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No library of NVML is found, wherever the tests run."""
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("format: fp8", 30, "error[E_FORMAT] config/appliance.yaml:2 model.format: fp8"),
        ("max_model_len: 100000", 10, "error[CONTEXT_TOO_LONG] config/appliance.yaml:2 model.max"),
    ],
)
def test_validate_without_a_gpu_refuses_what_is_wrong_on_any(
    appliance: Run, configure: Configure, words: str, code: int, said: str
) -> None:
    path = configure()
    path.write_text(path.read_text().replace("}", f", {words}}}"))

    ended = appliance("validate")

    assert (ended.code, ended.out) == (code, "")
    assert ended.err.startswith(said)


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize(
    "sections", ["", "parallel: {mode: tensor}\n", "parallel: {mode: pipeline, gpus: [4, 5]}\n"]
)
def test_validate_without_a_gpu_accepts_what_some_machine_serves(
    appliance: Run, configure: Configure, sections: str
) -> None:
    configure(sections)

    ended = appliance("validate")

    assert ended.code == 0
    assert "plan           not made: " in ended.out
    assert "by --assume 2x16GiB" in ended.out


def test_validate_assumed_gpus_change_nothing_on_the_cpu(
    appliance: Run, configure: Configure
) -> None:
    configure("execution: {device: cpu}\nmemory: {kv_cache_size: 1GiB}\n")

    ended = appliance("validate", "--assume", "2x16GiB", "--json")

    assert ended.code == 0
    place = "config/appliance.yaml:3 execution.device"
    assert ended.err == f"warning {place}: cpu uses no GPU, so that --assume changes nothing\n"
    assert json.loads(ended.out)["plan"]["memory"]["ranks"][0]["total_bytes"] < 2**50


def test_validate_absent_checkpoint_is_told_at_the_key_that_names_it(
    appliance: Run, configure: Configure, tmp_path: Path
) -> None:
    path = configure()
    path.write_text(f"version: 1\nmodel:\n  path: {tmp_path}/absent\n")

    ended = appliance("validate", "--assume", "2x16GiB")

    assert ended.code == 30
    place = "config/appliance.yaml:3 model.path"
    assert ended.err.startswith(
        f"error[E_PATH] {place}: must be a directory, got nothing at {tmp_path}/absent; name "
    )
