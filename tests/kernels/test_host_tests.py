"""The C++ host tests, built with the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_host_tests_under_sanitizers_pass(repository: Path) -> None:
    tools = os.path.dirname(sys.executable)  # noqa: PTH120 - the venv's own folder, unresolved
    build = repository / "kernels" / "build-sanitize"
    cmake = f"{tools}/cmake"

    _run(
        *(cmake, "-S", str(repository / "kernels"), "-B", str(build), "-G", "Ninja"),
        *(f"-DCMAKE_MAKE_PROGRAM={tools}/ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"),
        *("-DNVFP4_TESTS=ON", "-DNVFP4_SANITIZE=ON", f"-DNVFP4_LIBRARY_DIR={build}/lib"),
    )
    _run(cmake, "--build", str(build), "--target", "nvfp4_host_tests", "--parallel", "2")
    report = _run(f"{tools}/ctest", "--test-dir", str(build), "--output-on-failure")

    assert "100% tests passed" in report


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout
