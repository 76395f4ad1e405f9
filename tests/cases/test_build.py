"""Reported faults of building an image, by the id of the case; tests/unit/docker has the audits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CMAKE = Path(sys.executable).parent / "cmake"
NINJA = Path(sys.executable).parent / "ninja"


@pytest.mark.parametrize(
    ("part", "option"), [("src", "ON"), ("quantize", "OFF"), ("reference", "OFF")]
)
def test_rc_062_part_of_the_kernels_that_was_not_copied_ends_the_configuration(
    repository: Path, tmp_path: Path, part: str, option: str
) -> None:
    left_out = shutil.ignore_patterns("build*", "bench", "tests", "audit", "patches")
    shutil.copytree(repository / "kernels", tmp_path / "kernels", ignore=left_out)
    shutil.rmtree(tmp_path / "kernels" / part)
    words = ("-S", tmp_path / "kernels", "-B", tmp_path / "build", "-G", "Ninja")
    sets = (f"-DNVFP4_CUDA={option}", f"-DCMAKE_MAKE_PROGRAM={NINJA}")

    done = subprocess.run((CMAKE, *words, *sets), capture_output=True, text=True, check=False)

    assert done.returncode != 0
    assert f'add_subdirectory given source "{part}"' in done.stderr


BUILD = """\
#!/bin/sh
case "$1" in
  --build) echo "{said}"; exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("said", "jobs", "is_memory"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus", 4, True),
        ("nvcc error: 'cicc' died due to signal 9 (Kill signal)", 1, True),
        ("abi.h:3: error: expected ';'", 4, False),
    ],
    ids=["killed", "signal", "source"],
)
def test_rc_066_killed_compiler_is_named_with_the_next_lower_number_of_jobs(
    repository: Path, tmp_path: Path, said: str, jobs: int, is_memory: bool
) -> None:
    stub = tmp_path / "cmake"
    stub.write_text(BUILD.format(said=said))
    stub.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    words = ("docker/build_kernels.sh", str(jobs))

    done = subprocess.run(
        words, cwd=repository, capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": path},
    )  # fmt: skip

    assert done.returncode == 1
    assert f"compiling with {jobs} jobs" in done.stdout
    assert ("error[BUILD_OOM]" in done.stderr) is is_memory
    if is_memory:
        assert f"IMAGE_JOBS={max(1, jobs - 1)}" in done.stderr
