"""The bench for GPUs: its flow over any memory, and its words without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BENCH = REPOSITORY / "kernels" / "bench"
# The reference library's memory is the host's: the driver is replaced, the checks are not.
ON_HOST = """
import json, sys
from pathlib import Path
bench, root = sys.argv[1:]
sys.path[:0] = [bench, root]
import bench_gpu, numpy as np
from appliance.nvfp4.library import reference_library

class HostMemory:
    def __init__(self): self.held = {}
    def allocate(self, nbytes):
        array = np.zeros(nbytes + 256, np.uint8)
        address = -(-array.ctypes.data // 256) * 256
        self.held[address] = array
        return address
    def release(self, address): del self.held[address]
    def view(self, address, nbytes):
        for array in self.held.values():
            begin = address - array.ctypes.data
            if 0 <= begin and begin + nbytes <= array.nbytes: return array[begin : begin + nbytes]
        raise LookupError(address)
    def write(self, address, array):
        self.view(address, array.nbytes)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    def read(self, address, nbytes): return self.view(address, nbytes).tobytes()
    def median_us(self, run, rounds): run(); return 2.0

library = reference_library()
rows = []
try:
    for case in ("matmul:3x32x64", "dequantize:32x64"):
        rows += bench_gpu.rows_of(HostMemory(), library, case, 3, {"copy": 100.0})
    spoiled = library.matmul
    library.matmul = lambda weight, m, **named: spoiled(weight, m - 1, **named)
    bench_gpu.rows_of(HostMemory(), library, "matmul:3x32x64", 3, {"copy": 100.0})
except ArithmeticError as error:
    print(json.dumps({"rows": rows, "refused": str(error)}))
"""


def test_bench_gpu_times_right_results_and_refuses_a_wrong_one() -> None:
    done = subprocess.run(
        (sys.executable, "-c", ON_HOST, BENCH, REPOSITORY),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["call"] for row in found["rows"]] == ["matmul", "dequantize"]
    assert all(row["us"] == 2.0 for row in found["rows"])
    assert found["refused"] == "matmul:3x32x64 matmul: error inf, not timed"


def test_bench_gpu_without_a_gpu_says_so() -> None:
    done = subprocess.run(
        (sys.executable, BENCH / "bench_gpu.py"),
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ, CUDA_VISIBLE_DEVICES=""),
    )

    assert done.returncode == 2
    assert done.stderr.startswith("bench: no GPU: ")
    assert done.stdout == ""
