"""The image audit over libraries that nvcc makes here: the right architecture, the wrong, none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NVCC = Path("/usr/bin/nvcc")
TOOLS = {**os.environ, "PATH": "/usr/bin:/bin"}

SOURCE = """
__global__ void __launch_bounds__(32, (2)) First(int* x) { *x = 1; }
// __global__ void NotAKernel(int* x)
template <int N> __global__ void Second(int* x) { *x = N; }
template __global__ void Second<3>(int*);
"""

needs_nvcc = pytest.mark.skipif(not NVCC.exists(), reason="no /usr/bin/nvcc")


def audit(*words: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "docker/audit_image.py")
    return subprocess.run(
        (sys.executable, script, *words), capture_output=True, text=True, check=False, env=TOOLS
    )


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `volta` and `ampere`, each with a library of the appliance's name, and the source."""
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "src").mkdir()
    source = folder / "src/kernels.cu"
    source.write_text(SOURCE)
    for name, code in (("volta", "70"), ("ampere", "80")):
        (folder / name).mkdir()
        arch = f"arch=compute_{code},code=[sm_{code},compute_{code}]"
        output = str(folder / name / "libnvfp4_sm70.so")
        command = (str(NVCC), "-ccbin", "g++-11", "-shared", "-Xcompiler", "-fPIC")
        subprocess.run(
            (*command, "-gencode", arch, "-o", output, str(source)), check=True, env=TOOLS
        )
    return folder


@needs_nvcc
@pytest.mark.slow
def test_files_lists_what_cuobjdump_lists(libraries: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"

    done = audit("files", str(libraries), "--need", "--report", str(report))

    assert done.returncode == 0, done.stderr
    rows = {row["path"]: row for row in json.loads(report.read_text())}
    for name in ("volta", "ampere"):
        path = f"{name}/libnvfp4_sm70.so"
        for option, kind in (("--list-elf", "sass"), ("--list-ptx", "ptx")):
            said = subprocess.run(
                ("cuobjdump", option, str(libraries / path)),
                capture_output=True,
                text=True,
                check=True,
                env=TOOLS,
            ).stdout
            expected = sorted({int(arch) for arch in re.findall(r"\.sm_(\d+)\.", said)})
            assert rows[path][kind] == expected


@needs_nvcc
@pytest.mark.slow
def test_files_passes_a_library_with_code_for_volta(libraries: Path) -> None:
    done = audit("files", str(libraries / "volta"))

    assert done.returncode == 0, done.stderr
    assert "sass sm_70" in done.stdout


@needs_nvcc
@pytest.mark.slow
def test_rc_060_files_refuses_a_library_for_another_gpu(libraries: Path) -> None:
    done = audit("files", str(libraries / "ampere"))

    assert done.returncode == 1
    assert "error[NO_SM70] libnvfp4_sm70.so: must hold code for sm_70, got sm_80;" in done.stderr


def test_files_refuses_an_image_without_our_library(tmp_path: Path) -> None:
    (tmp_path / "libother.so").write_bytes(b"\x7fELF" + bytes(100))

    done = audit("files", str(tmp_path))

    assert done.returncode == 1
    assert "error[NO_DEVICE_CODE] appliance" in done.stderr


@needs_nvcc
@pytest.mark.slow
def test_kernels_counts_the_entries_of_each_kernel(libraries: Path) -> None:
    library = str(libraries / "volta/libnvfp4_sm70.so")

    done = audit("kernels", library, "--sources", str(libraries / "src"))

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["First  sm_70 1", "Second  sm_70 1"]


@needs_nvcc
@pytest.mark.slow
def test_rc_061_kernels_refuses_one_that_lacks_the_architecture(
    libraries: Path, tmp_path: Path
) -> None:
    (tmp_path / "kernels.cu").write_text(SOURCE + "__global__ void Third(int* x) { *x = 3; }\n")
    library = str(libraries / "volta/libnvfp4_sm70.so")

    done = audit("kernels", library, "--sources", str(tmp_path))

    assert done.returncode == 1
    assert "error[KERNEL_WITHOUT_SM70] Third" in done.stderr
    assert "First  " in done.stdout


def test_system_refuses_the_drivers_library_and_compat_paths(tmp_path: Path) -> None:
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/libcuda.so.1").write_bytes(b"")
    (tmp_path / "etc/ld.so.conf.d").mkdir(parents=True)
    (tmp_path / "etc/ld.so.conf.d/cuda.conf").write_text("/usr/local/cuda/compat\n")

    done = audit("system", str(tmp_path))

    assert done.returncode == 1
    assert "error[DRIVER_IN_IMAGE]" in done.stderr
    assert "error[CUDA_COMPAT]" in done.stderr


def test_system_passes_a_plain_root(tmp_path: Path) -> None:
    (tmp_path / "usr/lib/stubs").mkdir(parents=True)
    (tmp_path / "usr/lib/stubs/libcuda.so").write_bytes(b"")

    assert audit("system", str(tmp_path)).returncode == 0


@pytest.mark.parametrize("wanted", ["1", "7"])
def test_build_jobs_are_those_asked_for(wanted: str) -> None:
    assert build_jobs(wanted) == int(wanted)


def test_rc_066_build_jobs_by_themselves_fit_cores_and_memory() -> None:
    available = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    assert available is not None
    limit = min(len(os.sched_getaffinity(0)), max(1, int(available[1]) // 4194304 + 1))

    assert 1 <= build_jobs("0") <= limit


def build_jobs(wanted: str) -> int:
    script = str(ROOT / "docker/build_jobs.sh")
    done = subprocess.run((script, wanted), capture_output=True, text=True, check=True)
    return int(done.stdout)
