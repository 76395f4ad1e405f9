"""What must not start: each case has one clear message, its exit code, and no engine."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from modules import module_at

ROOT = Path(__file__).parents[2]
IMAGE = "nvfp4-appliance:cpu"
MODEL = "smollm2-nvfp4"
RECORDS = Path(__file__).parent / "records"
UP = ("up", "--detach", "--wait", "--wait-timeout", "120")
NEVER = "0001-01-01T00:00:00Z"

pytestmark = pytest.mark.slow


def refused_by_gate(stack: Any, code: int) -> str:
    """Bring the stack up, expect the gate's code and an engine that never ran; return its log."""
    done = stack.compose(*UP)

    assert done.returncode != 0
    assert f'service "gate" didn\'t complete successfully: exit {code}' in done.stderr
    assert stack.state()["StartedAt"] == NEVER
    return stack.container("gate").logs().decode()


def test_bad_machine_refuses_with_the_gate_code(stack: Any) -> None:
    record = "/records/uncorrected-error.json"
    gate = {"command": ["gate", "--simulate", record, "--as", "tp2"]}
    stack.override({"services": {"gate": {**gate, "volumes": [f"{RECORDS}:/records:ro"]}}})

    said = refused_by_gate(stack, 20)

    assert "GPU 0: 3 uncorrected memory errors" in said


def test_small_shared_memory_refuses_with_12(
    stack: Any, two_gpus: Path, run_image: Callable[..., tuple[int, str]]
) -> None:
    stack.configure(
        stack.configuration(
            execution={"device": "cuda"},
            parallel={"mode": "pipeline"},
            gate={"p2p": {"policy": "off", "functional_test": False}},
        )
    )
    given = {
        "config": stack.config,
        "volumes": {str(two_gpus): {"bind": "/fakes", "mode": "ro"}},
        "environment": {
            "LD_LIBRARY_PATH": "/fakes",
            "NVML_FAKE_SCENARIO": "/fakes/nvml.json",
            "CUDA_FAKE_SCENARIO": "/fakes/cuda.json",
        },
    }
    words = ("gate", "--config", "/etc/appliance/appliance.yaml")

    code, said = run_image(*words, shm_size="64m", **given)

    assert code == 12, said
    assert "shared memory has 64 MiB, the plan needs 16384 MiB" in said
    assert "host.shm" not in run_image(*words, shm_size="16g", **given)[1]


@pytest.fixture
def two_gpus(tmp_path: Path) -> Path:
    """A folder with NVML and CUDA driver of a machine with two healthy V100s."""
    folder = tmp_path / "fakes"
    build = module_at(ROOT / "tests/fakes/nvml/build.py")
    build.build_nvml(folder)
    build.build_cuda(folder)
    state = module_at(ROOT / "tests/gate/conftest.py").healthy()
    (folder / "nvml.json").write_text(json.dumps(state))
    devices = [gpu["bus_id"].removeprefix("0000").lower() for gpu in state["gpus"]]
    (folder / "cuda.json").write_text(json.dumps({"devices": devices}))
    return folder


def test_missing_model_refuses_with_30(stack: Any) -> None:
    stack.configure(stack.configuration(model={"path": "/models/absent"}))

    said = refused_by_gate(stack, 30)

    assert said.count("error[") == 1
    assert "/models/absent" in said


@pytest.fixture
def private(models: Path, tmp_path: Path) -> Path:
    """A folder of models whose one checkpoint is closed to all but its owner."""
    checkpoint = tmp_path / "private" / MODEL
    shutil.copytree(models / MODEL, checkpoint)
    checkpoint.chmod(0o700)
    return checkpoint.parent


def test_model_of_another_user_refuses_with_30(stack: Any, private: Path) -> None:
    stack.models = private

    said = refused_by_gate(stack, 30)

    assert said.count("error[") == 1
    assert "ermission denied" in said


def test_missing_models_directory_is_named_and_not_made(stack: Any, tmp_path: Path) -> None:
    stack.models = tmp_path / "nowhere"

    done = stack.compose(*UP)

    assert done.returncode != 0
    assert f"bind source path does not exist: {stack.models}" in done.stderr
    assert not stack.models.exists()


def test_broken_configuration_refuses_with_10(stack: Any) -> None:
    stack.configure(stack.configuration(server={"prot": 1}))

    said = refused_by_gate(stack, 10)

    assert "did you mean" in said or "port" in said


def test_open_api_without_keys_refuses_with_10(stack: Any) -> None:
    stack.configure(stack.configuration(server={"host": "0.0.0.0"}))  # noqa: S104 - refused

    assert "API_WITHOUT_KEYS" in refused_by_gate(stack, 10)


def test_taken_port_is_named_by_compose(stack: Any) -> None:
    with socket.create_server(("127.0.0.1", stack.port)):
        done = stack.compose(*UP)

    assert done.returncode != 0
    assert str(stack.port) in done.stderr
    assert "address already in use" in done.stderr or "port is already allocated" in done.stderr


def test_read_only_state_refuses_with_12(
    run_image: Callable[..., tuple[int, str]], stack: Any
) -> None:
    code, said = run_image(
        "serve",
        "--config",
        "/etc/appliance/appliance.yaml",
        config=stack.config,
        volumes={str(stack.folder): {"bind": "/var/lib/appliance", "mode": "ro"}},
    )

    assert code == 12, said
    assert "error[STATE_DIR]" in said


def test_container_without_gpu_refuses_the_gpu_configuration_with_11(
    run_image: Callable[..., tuple[int, str]],
) -> None:
    code, said = run_image(
        "gate", "--config", "/etc/appliance/appliance.yaml", config=ROOT / "config"
    )

    assert code == 11, said


def test_host_without_gpu_runtime_is_told_what_to_install(stack: Any) -> None:
    code, said = stack.appliance_up(
        stack.configuration(execution={"device": "cuda"}), "--assume", "2x16GiB", image=IMAGE
    )

    assert code == 11, said
    assert "error[NO_GPU_RUNTIME]" in said
    assert "nvidia-ctk runtime configure" in said


def test_up_passes_the_code_and_the_lines_of_the_gate_on(stack: Any, private: Path) -> None:
    stack.models = private

    code, said = stack.appliance_up(stack.configuration())

    assert code == 30, said
    assert "ermission denied" in said
    assert "gate ended in 30" in said


def test_up_of_a_missing_image_says_how_to_build_it(stack: Any) -> None:
    code, said = stack.appliance_up(stack.configuration(), image="nvfp4-appliance:absent")

    assert code == 12, said
    assert "error[IMAGE_MISSING]" in said
    assert "make image" in said


def test_up_labels_the_container_with_the_configuration(stack: Any) -> None:
    def label(seats: int) -> str:
        text = stack.configuration(memory={"max_num_seqs": seats})
        code, said = stack.appliance_up(text, "--render-only")
        assert code == 0, said
        rendered = stack.folder / "project/compose.override.yaml"
        stack.files = [rendered]
        document = json.loads(stack.compose("config", "--format", "json").stdout)
        return document["services"]["engine"]["labels"]["appliance.config-sha256"]

    assert label(2) != label(3)


def test_up_of_the_default_configuration_renders_nothing(stack: Any) -> None:
    text = (ROOT / "config/appliance.yaml").read_text()
    checkpoint = str(stack.models / MODEL)
    given = ("--assume", "2x16GiB", "--model", checkpoint, "--render-only")

    code, said = stack.appliance_up(text, *given)

    assert code == 0, said
    assert not (stack.folder / "project/compose.override.yaml").exists()
