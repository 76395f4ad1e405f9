"""The Triton kernels that serving runs, as the gpu image compiles them for V100s."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import docker.errors
import pytest

import docker

HERE = Path(__file__).parent / "triton"
VSIM = Path(__file__).parents[3] / "shared" / "vsim"
IMAGE = "nvfp4-appliance:gpu"
PROGRAMS = {"top_k", "top_p", "top_k and top_p", "slots", "zeros"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(client: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the image's Triton made of each kernel, in files."""
    made = tmp_path_factory.mktemp("sm70")
    made.chmod(0o777)
    volumes = {
        str(HERE / "compile_sm70.py"): {"bind": "/compile_sm70.py", "mode": "ro"},
        str(made): {"bind": "/out", "mode": "rw"},
    }
    try:
        client.containers.run(
            IMAGE,
            ["/compile_sm70.py", "/out"],
            entrypoint="/opt/appliance/bin/python",
            environment={"TRITON_CACHE_DIR": "/tmp/triton"},  # noqa: S108 - inside of the container
            network_mode="none",
            remove=True,
            tmpfs={"/tmp": "exec"},  # noqa: S108
            volumes=volumes,
        )
    except docker.errors.ImageNotFound:
        pytest.skip(f"no image {IMAGE}, run `make image`")
    return made


def test_every_kernel_compiles_for_sm_70(folder: Path) -> None:
    known: dict[str, Any] = json.loads((folder / "programs.json").read_text())["programs"]

    assert set(known) == PROGRAMS
    for name, program in known.items():
        assert (folder / f"{name}.cubin").stat().st_size > 0
        assert program["shared"] <= 48 * 1024, f"{name} needs more shared memory than a launch gets"


@pytest.mark.vsim
@pytest.mark.skipif(not VSIM.is_dir(), reason="no vsim")
@pytest.mark.skipif(not Path("/usr/bin/nvcc").is_file(), reason="no nvcc 11.8")
def test_machine_code_of_every_kernel_gives_the_right_values(folder: Path) -> None:
    done = subprocess.run(
        (str(VSIM / "run"), sys.executable, str(HERE / "run_sm70.py"), str(folder)),
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ, VSIM_FUNC="1"),
    )

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("RESULTS ")]
    assert json.loads(line.removeprefix("RESULTS ")) == dict.fromkeys(PROGRAMS, "ok")
