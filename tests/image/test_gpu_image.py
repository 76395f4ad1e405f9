"""What the image for V100s is, as far as a machine without one can tell.

Where the index of torch's build for sm_70 is out of reach another torch stands in; the label
`appliance.torch` says so, and what depends on it is asked of the real one only.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker.errors
import pytest

import docker

ROOT = Path(__file__).parents[2]
IMAGE = "nvfp4-appliance:gpu"
SITE = "/opt/appliance/lib/python3.11/site-packages"
GB = 1000**3
STAND_IN_BYTES = 3 * GB
"""With torch's CPU build; see docs/images.md for what the real one adds."""
AUDIT = {str(ROOT / "docker/audit_image.py"): {"bind": "/audit_image.py", "mode": "ro"}}

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def gpu_image(client: docker.DockerClient) -> Any:
    with contextlib.suppress(docker.errors.ImageNotFound):
        return client.images.get(IMAGE)
    pytest.skip(f"no image {IMAGE}, run `make image`")


@pytest.fixture
def run_gpu_image(gpu_image: Any, run_image: Run) -> Run:
    def run(*words: str, **settings: Any) -> tuple[int, str]:
        return run_image(*words, image=IMAGE, **settings)

    assert gpu_image
    return run


def test_gpu_image_runs_as_a_numbered_user_below_tini(gpu_image: Any) -> None:
    config = gpu_image.attrs["Config"]

    assert config["User"] == "10001:0"
    assert config["Entrypoint"] == ["/usr/bin/tini", "--", "appliance"]
    assert config["Healthcheck"]["Test"][-1] == "healthchecks.probes.ready"
    assert "PYTHONSAFEPATH=1" in config["Env"]
    assert not [word for word in config["Env"] if word.startswith("LD_LIBRARY_PATH=")]


def test_gpu_image_keeps_no_secret(gpu_image: Any) -> None:
    text = json.dumps([gpu_image.attrs["Config"], gpu_image.history()]).lower()

    for word in ("password", "token=", "api_key", "begin certificate", "http_proxy", "ca-bundle"):
        assert word not in text, word


def test_gpu_image_size_is_measured_and_bounded(gpu_image: Any) -> None:
    size = gpu_image.attrs["Size"]
    torch = gpu_image.attrs["Config"]["Labels"]["appliance.torch"]

    sys.stdout.write(f"{IMAGE} with {torch}: {size / GB:.2f} GB\n")
    if torch.endswith("+cpu"):
        assert size <= STAND_IN_BYTES


@pytest.mark.slow
def test_gpu_image_has_a_c_compiler_and_no_other_build_tool(run_gpu_image: Run) -> None:
    tools = ("gcc", "nvcc", "g++", "cmake", "pip", "git", "curl")
    script = "import shutil, sys; print(*filter(shutil.which, sys.argv[1:]))"

    code, said = run_gpu_image("-c", script, *tools, entrypoint="python")

    assert (code, said.split()) == (0, ["gcc"])


@pytest.mark.slow
def test_gpu_image_holds_volta_code_of_ours(run_gpu_image: Run, gpu_image: Any) -> None:
    code, said = run_gpu_image("/opt/appliance/device-code.json", entrypoint="cat")
    assert code == 0, said
    rows = {Path(row["path"]).name: row for row in json.loads(said)}

    assert rows["libnvfp4_sm70.so"]["sass"] == [70]
    assert rows["libnvfp4_sm70.so"]["ptx"] == [70]
    if gpu_image.attrs["Config"]["Labels"]["appliance.torch"].endswith("+cu126"):
        assert 70 in rows["libtorch_cuda.so"]["sass"]


@pytest.mark.slow
def test_gpu_image_brings_nothing_of_the_driver(run_gpu_image: Run) -> None:
    code, said = run_gpu_image("/audit_image.py", "system", "/", entrypoint="python", volumes=AUDIT)

    assert code == 0, said


@pytest.mark.slow
def test_rc_057_triton_builds_its_launcher_for_any_user_on_a_read_only_root(
    run_gpu_image: Run,
) -> None:
    code, said = run_gpu_image(
        "/audit_image.py", "launch", entrypoint="python", volumes=AUDIT, user="12345:0"
    )

    assert code == 0, said
    assert "launcher of Triton: built" in said


PREREQUISITES = """
import os
from appliance.serve.prerequisites import missing_compiler, unwritable_cache
for fault in (missing_compiler(os.environ), unwritable_cache(os.environ)):
    print(fault or "ok")
"""


def test_rc_057_rc_058_gpu_image_has_what_the_engine_needs_for_any_user(run_gpu_image: Run) -> None:
    code, said = run_gpu_image("-c", PREREQUISITES, entrypoint="python", user="12345:0")

    assert (code, said.split()) == (0, ["ok", "ok"])


LAUNCH_WITHOUT_COMPILER = """
import os
os.environ.pop("CC")
os.environ["PATH"] = "/opt/appliance/bin"
os.environ["TRITON_LIBCUDA_PATH"] = "/tmp"
from triton.backends.nvidia.driver import CudaUtils
CudaUtils()
"""


@pytest.mark.slow
def test_triton_launches_nothing_without_a_compiler(run_gpu_image: Run) -> None:
    code, said = run_gpu_image("-c", LAUNCH_WITHOUT_COMPILER, entrypoint="python")

    assert code == 1
    assert "Failed to find C compiler" in said


@pytest.mark.slow
def test_gpu_image_without_a_driver_refuses_with_11(run_gpu_image: Run) -> None:
    words = ("gate", "--config", "/etc/appliance/appliance.yaml")

    code, said = run_gpu_image(*words, config=ROOT / "config")

    assert code == 11, said
    assert "NVML does not open" in said
    assert "install the NVIDIA container toolkit" in said
    assert "1 fail" in said


OURS = (
    "import hashlib, pathlib, sys\n"
    "for folder in ('appliance', 'healthchecks', 'v100_nvfp4_appliance-0.1.0.dist-info'):\n"
    "    for path in sorted(pathlib.Path(sys.argv[1], folder).rglob('*')):\n"
    "        if path.is_file(): print(hashlib.sha256(path.read_bytes()).hexdigest(), path)\n"
)


@pytest.mark.slow
def test_two_builds_give_the_same_files_of_ours(
    gpu_image: Any, client: docker.DockerClient, run_gpu_image: Run, run_image: Run
) -> None:
    """Each image installs and compiles our wheel by itself: names and bytes must not differ."""
    images = (gpu_image, client.images.get("nvfp4-appliance:cpu"))
    revisions = {image.labels["org.opencontainers.image.revision"] for image in images}
    assert len(revisions) == 1, f"build both images from one checkout: {revisions}"
    listed = []
    for run in (run_gpu_image, run_image):
        code, said = run("-c", OURS, SITE, entrypoint="python")
        assert code == 0, said
        rows = dict(reversed(line.split(" ", 1)) for line in said.splitlines())
        rows.pop(f"{SITE}/appliance/lib/libnvfp4_sm70.so", None)  # not in the image for CPUs
        listed.append(rows)

    assert listed[0] == listed[1]
    assert any(name.endswith(".pyc") for name in listed[0])
    assert any(name.endswith(".so") for name in listed[0])
