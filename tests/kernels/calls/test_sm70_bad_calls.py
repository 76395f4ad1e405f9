"""Wrong calls of the sm_70 library: a status, a sentence, no crash, nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
VSIM = Path(__file__).parents[4] / "shared" / "vsim"
sys.path.insert(0, str(HERE.parent / "vsim"))

from sm70_build import built_library, has_compiler  # noqa: E402 - found through the line above

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_compiler(), reason="no nvcc 11.8"),
]
LEAST_CASES = 300


def answers(*command: str | Path, **environment: str) -> dict[str, object]:
    done = subprocess.run(
        tuple(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ, **environment),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("RESULTS ")]
    found: dict[str, object] = json.loads(line.removeprefix("RESULTS "))
    return found


@pytest.mark.vsim
@pytest.mark.skipif(not VSIM.is_dir(), reason="no vsim")
def test_wrong_calls_on_the_model_are_refused_and_right_ones_taken(repository: Path) -> None:
    library = built_library(repository, "nvfp4_sm70_shared")
    script = HERE / "sm70_calls.py"

    found = answers(VSIM / "run", sys.executable, script, library, "model", VSIM_FUNC="1")

    assert found["faults"] == {}
    assert found["count"] >= LEAST_CASES


def test_wrong_calls_without_a_device_are_refused_for_their_own_fault(repository: Path) -> None:
    library = built_library(repository, "nvfp4_sm70")

    # No card, also where one is installed.
    found = answers(
        sys.executable, HERE / "sm70_calls.py", library, "bare", CUDA_VISIBLE_DEVICES=""
    )

    assert found["faults"] == {}
    assert found["count"] >= LEAST_CASES
