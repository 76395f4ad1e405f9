"""Builds the CUDA libraries for tests, once for all workers; ninja rebuilds only what changed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

NVCC = Path("/usr/bin/nvcc")


def has_compiler() -> bool:
    """Tell whether nvcc 11.8 is installed where the build looks for it."""
    if not NVCC.is_file():
        return False
    version = subprocess.run((NVCC, "--version"), capture_output=True, text=True, check=False)
    return "release 11.8" in version.stdout


def built_library(repository: Path, target: str) -> Path:
    """Return the library of a CMake target, `nvfp4_sm70` or `nvfp4_sm70_shared`."""
    tools = os.path.dirname(sys.executable)  # noqa: PTH120 - the venv's own folder, unresolved
    build = repository / "kernels" / "build-sm70"
    build.mkdir(exist_ok=True)
    with (build / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run(
            *(f"{tools}/cmake", "-S", str(repository / "kernels"), "-B", str(build)),
            *("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools}/ninja", "-DNVFP4_CUDA=ON"),
            *("-DNVFP4_CUDART_SHARED=ON", f"-DNVFP4_LIBRARY_DIR={build}/lib"),
        )
        _run(f"{tools}/cmake", "--build", str(build), "--target", target, "--parallel", "2")
    folder = build if target.endswith("_shared") else build / "lib"
    return folder / f"lib{target}.so"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
