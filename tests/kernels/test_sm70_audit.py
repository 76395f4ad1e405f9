"""The audit of the machine code: the library is as designed, and broken kernels are named."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
AUDIT = REPOSITORY / "kernels" / "audit" / "audit.py"
SOURCES = REPOSITORY / "kernels" / "src"
GOLDEN = REPOSITORY / "tests" / "golden" / "kernels" / "audit.txt"
sys.path.insert(0, str(Path(__file__).parent / "vsim"))

from sm70_build import NVCC, built_library, has_compiler  # noqa: E402 - found through the line above

pytestmark = [
    pytest.mark.slow,
    pytest.mark.serial,
    pytest.mark.skipif(not has_compiler(), reason="no nvcc 11.8"),
]

VOLTA = "arch=compute_70,code=[sm_70,compute_70]"
TOY = """
#include <cuda_fp16.h>
__global__ void __launch_bounds__(64) PlainKernel(float* x) { x[threadIdx.x] *= 2.0f; }
"""
SPILLING = """
__global__ void __launch_bounds__(64) SpillKernel(float* x, int at) {
  float held[64];
  for (int i = 0; i < 64; ++i) held[i] = x[i * 64 + threadIdx.x];
  for (int i = 0; i < at; ++i) held[(i * at) & 63] += held[i & 63];
  x[threadIdx.x] = held[at & 63];
}
"""
# A product in name and instructions: one tile, a loop, and what the template argument adds to it.
PRODUCT = """
template <int MT, bool kBarrier, bool kAtomic>
__global__ void __launch_bounds__(64) SkinnyKernel(const uint4* w, float* y, int steps) {
  float c[8] = {};
  for (int i = 0; i < steps; ++i) {
    const uint4 a = w[i * 64 + threadIdx.x];
    if (kBarrier) __syncthreads();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      asm volatile(
          "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, "
          "{%10,%11}, {%0,%1,%2,%3,%4,%5,%6,%7};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
            "+f"(c[7])
          : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w));
    }
  }
  for (int i = 0; i < 8; ++i) {
    if (kAtomic) atomicAdd(y + i, c[i]);
    else y[threadIdx.x * 8 + i] = c[i];
  }
}
template __global__ void SkinnyKernel<1, false, false>(const uint4*, float*, int);
template __global__ void SkinnyKernel<1, true, false>(const uint4*, float*, int);
template __global__ void SkinnyKernel<1, false, true>(const uint4*, float*, int);
"""


@dataclass(frozen=True)
class Verdict:
    code: int
    table: str
    faults: list[str]


def audit(*arguments: str | Path) -> Verdict:
    done = subprocess.run(
        (sys.executable, AUDIT, *arguments), capture_output=True, text=True, check=False
    )
    return Verdict(done.returncode, done.stdout, done.stderr.splitlines())


def compiled(folder: Path, source: str, *targets: str) -> Path:
    """An object file of one source for some targets."""
    path = folder / f"toy{len(list(folder.iterdir()))}.cu"
    path.write_text(source)
    object_file = path.with_suffix(".o")
    generated = [word for target in targets for word in ("-gencode", target)]
    subprocess.run(
        (
            NVCC,
            "-ccbin",
            "g++-11",
            "-Xcompiler",
            "-fPIC",
            *generated,
            "-c",
            "-o",
            object_file,
            path,
        ),
        check=True,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
    )
    return object_file


@pytest.fixture(scope="session")
def library() -> Path:
    """libnvfp4_sm70.so of this checkout."""
    return built_library(REPOSITORY, "nvfp4_sm70")


def test_library_is_as_designed_and_as_reviewed(library: Path) -> None:
    verdict = audit(library, "--sources", SOURCES, "--golden", GOLDEN)

    assert verdict.faults == []
    assert verdict.code == 0


def test_another_table_fails_until_updated(tmp_path: Path) -> None:
    toy = compiled(tmp_path, TOY, VOLTA)
    golden = tmp_path / "golden" / "audit.txt"

    missing = audit(toy, "--golden", golden)
    written = audit(toy, "--golden", golden, "--update")
    same = audit(toy, "--golden", golden)
    golden.write_text(golden.read_text().replace("PlainKernel", "OtherKernel"))
    other = audit(toy, "--golden", golden)

    assert [missing.code, written.code, same.code, other.code] == [1, 0, 0, 1]
    assert "is missing" in missing.faults[0]
    assert "the table differs" in other.faults[0]
    assert any(fault.startswith("audit: +PlainKernel") for fault in other.faults)


def test_kernel_for_another_gpu_is_named(tmp_path: Path) -> None:
    verdict = audit(compiled(tmp_path, TOY, "arch=compute_80,code=sm_80"))

    assert verdict.code == 1
    assert "audit: PlainKernel: machine code for sm_80, not sm_70 alone" in verdict.faults
    assert "audit: PlainKernel: PTX for nothing, not compute_70 alone" in verdict.faults


def test_kernel_that_spills_is_named(tmp_path: Path) -> None:
    verdict = audit(compiled(tmp_path, SPILLING, VOLTA))

    assert verdict.code == 1
    assert any("SpillKernel: " in fault and "local loads" in fault for fault in verdict.faults)


def test_one_kernel_without_ptx_among_others_is_named(tmp_path: Path) -> None:
    whole = compiled(tmp_path, TOY, VOLTA)
    bare = compiled(tmp_path, TOY.replace("Plain", "Bare"), "arch=compute_70,code=sm_70")
    linked = tmp_path / "libtoy.so"
    subprocess.run(
        (NVCC, "-ccbin", "g++-11", "-shared", "-o", linked, whole, bare),
        check=True,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
    )

    verdict = audit(linked)

    assert verdict.faults == ["audit: BareKernel: PTX for nothing, not compute_70 alone"]


def test_products_with_a_barrier_or_atomics_are_named(tmp_path: Path) -> None:
    verdict = audit(compiled(tmp_path, TOY + PRODUCT, VOLTA))

    assert verdict.faults == [
        "audit: SkinnyKernel<1,false,true>: RED or ATOM where sums must keep their order",
        "audit: SkinnyKernel<1,true,false>: a barrier in the main loop",
    ]


def test_file_without_kernels_cannot_be_audited(tmp_path: Path) -> None:
    absent = audit(tmp_path / "absent.so")
    host_only = audit(compiled(tmp_path, "int main_of_nothing() { return 0; }", VOLTA))

    assert absent.code == 2
    assert host_only.code == 2
    assert "is no file" in absent.faults[0]
