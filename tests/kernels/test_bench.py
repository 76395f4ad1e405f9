"""The benches refuse to time a wrong library, and say what they timed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BENCH = REPOSITORY / "kernels" / "bench"
VSIM = REPOSITORY.parent / "shared" / "vsim"
sys.path[:0] = [str(Path(__file__).parent / "vsim"), str(BENCH)]

from bench_report import row_of, sources_sha256, table_of  # noqa: E402 - found through the line above
from sm70_build import built_library, has_compiler  # noqa: E402

MARKS = (
    pytest.mark.vsim,
    pytest.mark.slow,
    pytest.mark.skipif(not VSIM.is_dir(), reason="no vsim"),
    pytest.mark.skipif(not has_compiler(), reason="no nvcc 11.8"),
)


def needs_model(test: Callable[..., None]) -> Callable[..., None]:
    for mark in MARKS:
        test = mark(test)
    return test


# Stands before the real library: the last token of every product is left out.
WRONG = """
#include <dlfcn.h>
#include <stdint.h>
typedef int32_t (*Matmul)(const void*, int32_t, int64_t, const void*, int64_t, void*, int64_t,
                          const void*, void*, int64_t, void*);
int32_t nvfp4_matmul(const void* weight, int32_t type, int64_t m, const void* x, int64_t x_stride,
                     void* y, int64_t y_stride, const void* bias, void* workspace, int64_t bytes,
                     void* stream) {
  Matmul real = (Matmul)dlsym(RTLD_NEXT, "nvfp4_matmul");
  return real(weight, type, m - 1, x, x_stride, y, y_stride, bias, workspace, bytes, stream);
}
"""


def bench(library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, BENCH / "bench_vsim.py", library, "--vsim", VSIM, "--copy-mib", "5")
    return subprocess.run((*command, *arguments), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def right_library(repository: Path) -> Path:
    return built_library(repository, "nvfp4_sm70_shared")


@pytest.fixture
def wrong_library(right_library: Path, tmp_path: Path) -> Path:
    source, built = tmp_path / "wrong.c", tmp_path / "libwrong.so"
    source.write_text("#define _GNU_SOURCE\n" + WRONG)
    subprocess.run(
        (
            *("gcc", "-shared", "-fPIC", "-o", built, source, "-Wl,--no-as-needed"),
            *(right_library, f"-Wl,-rpath,{right_library.parent}", "-ldl"),
        ),
        check=True,
    )
    return built


@needs_model
def test_bench_checks_and_times_a_right_library(right_library: Path, tmp_path: Path) -> None:
    written = tmp_path / "bench.json"

    cases = "matmul:9x64x128,moe:2x16x2x32x64"
    done = bench(right_library, "--only", cases, "--json", str(written))

    assert done.returncode == 0, done.stderr
    document = json.loads(written.read_text())
    assert json.loads(done.stdout) == document
    assert document["machine"] == "simulated V100, +-15 %"
    assert document["sources_sha256"] == sources_sha256()
    rows = document["rows"]
    assert [row["call"] for row in rows] == ["matmul", "moe_plan", "moe_gate_up", "moe_down"]
    assert all(row["us"] > 0 for row in rows)
    assert all(row["error"] <= 1e-3 for row in rows)
    assert rows[0]["share_of_read"] == pytest.approx(
        rows[0]["weight_gb_s"] / document["gb_s"]["read"], abs=2e-3
    )


@needs_model
@pytest.mark.parametrize(
    ("script", "case", "rate"),
    [
        ("bench_attention.py", "decode:64x8x2x64x1", "read_gb_s"),
        ("bench_attention.py", "prefill:64x4x2x64x16", "tflops"),
        ("bench_gdn.py", "decode:2x2x64x1", "gb_s"),
        ("bench_gdn.py", "prefill:2x2x64x64", "us_per_token"),
    ],
)
def test_bench_of_single_operations_checks_and_times_a_case(
    right_library: Path, script: str, case: str, rate: str
) -> None:
    done = subprocess.run(
        (sys.executable, BENCH / script, right_library, "--vsim", VSIM, "--only", case),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert json.loads(done.stderr) == row
    assert row["case"] == case
    assert row["us"] > 0
    assert row[rate] > 0


@needs_model
def test_bench_prints_no_time_for_a_wrong_library(wrong_library: Path) -> None:
    done = bench(wrong_library, "--only", "matmul:9x64x128")

    assert done.returncode == 3
    assert "matmul:9x64x128 matmul: error inf, not timed" in done.stderr
    assert done.stdout == ""


def test_row_counts_weights_for_reads_and_all_bytes_for_copies() -> None:
    found = {
        "call": "matmul",
        "error": 1e-4,
        "weight_bytes": 8_000_000,
        "moved_bytes": 10_000_000,
        "flops": 4_000_000_000,
    }

    row = row_of("matmul:1x2x3", found, 20.0, {"copy": 1000.0, "read": 800.0})

    assert row["weight_gb_s"] == 400.0
    assert row["share_of_read"] == 0.5
    assert row["share_of_copy"] == 0.5
    assert row["tflops"] == 200.0
    assert "400.0" in table_of([row])


def test_row_of_a_call_without_weights_has_a_time_only() -> None:
    found = {"call": "moe_plan", "error": 0.0, "weight_bytes": 0, "moved_bytes": 32, "flops": 0}

    row = row_of("moe:1", found, 1.5, {"copy": 1000.0})

    assert row == {"case": "moe:1", "call": "moe_plan", "us": 1.5, "error": 0.0}
