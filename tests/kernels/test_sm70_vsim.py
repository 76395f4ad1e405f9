"""The Volta machine code itself, executed instruction by instruction on the modelled V100."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "vsim"
VSIM = Path(__file__).parents[3] / "shared" / "vsim"
sys.path.insert(0, str(HERE))

from sm70_attention_cases import ATTENTION_CASES  # noqa: E402 - found through the line above
from sm70_build import built_library, has_compiler  # noqa: E402 - found through the line above
from sm70_cases import CASES  # noqa: E402
from sm70_gdn_cases import GDN_CASES  # noqa: E402
from sm70_more_cases import MORE_CASES  # noqa: E402

pytestmark = [
    pytest.mark.vsim,
    pytest.mark.slow,
    pytest.mark.skipif(not VSIM.is_dir(), reason="no vsim"),
    pytest.mark.skipif(not has_compiler(), reason="no nvcc 11.8"),
]


@pytest.fixture(scope="session")
def modelled_library(repository: Path) -> Path:
    """libnvfp4_sm70 on the shared CUDA run time, which the model replaces."""
    return built_library(repository, "nvfp4_sm70_shared")


def run_on_model(*command: str | Path) -> str:
    """Run a program with the model as its CUDA run time; results only, no timing."""
    done = subprocess.run(
        (str(VSIM / "run"), *map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ, VSIM_FUNC="1"),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("case", sorted(CASES | MORE_CASES))
def test_volta_code_gives_the_right_values(case: str, modelled_library: Path) -> None:
    output = run_on_model(sys.executable, HERE / "sm70_run.py", modelled_library, case)

    (line,) = [each for each in output.splitlines() if each.startswith("RESULTS ")]
    assert json.loads(line.removeprefix("RESULTS "))[case] == "ok"


@pytest.mark.parametrize("cases", [ATTENTION_CASES, GDN_CASES], ids=["attention", "gdn"])
def test_volta_code_of_a_family_gives_the_right_values(
    cases: dict[str, object], modelled_library: Path
) -> None:
    """All cases in one process: loading the library's code takes longer than most of them."""
    output = run_on_model(sys.executable, HERE / "sm70_run.py", modelled_library, *cases)

    (line,) = [each for each in output.splitlines() if each.startswith("RESULTS ")]
    results = json.loads(line.removeprefix("RESULTS "))
    assert results == dict.fromkeys(cases, "ok")


def test_self_test_passes_on_the_model(modelled_library: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from appliance.nvfp4.library import Library;"
        "print('PROBLEMS', Library(Path(sys.argv[1])).self_test().problems)"
    )

    output = run_on_model(sys.executable, "-c", program, modelled_library)

    assert "PROBLEMS 14" in output
