#!/usr/bin/env python3
"""Times the sm_70 library on the GPU of this machine, beside a copy in the same run; JSON.

Needs numpy, the NVIDIA driver and the built library; no toolkit. Every call is checked against FP32
products of the exact weights, and a wrong one ends the bench before its time is taken. On anything
but Volta the products run from PTX, and the tensor instruction is emulated many times slower: such
times say that the code works there and nothing about a V100.

Usage: bench_gpu.py [LIBRARY] [--only matmul:8x17408x5120,moe:1] [--rounds 9] [--json FILE]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
# PYTHONSAFEPATH leaves a script's own folder out.
sys.path[:0] = [str(Path(__file__).parent), str(REPOSITORY / "tests/kernels/vsim"), str(REPOSITORY)]

from bench_cases import DEFAULT, calls_of
from bench_device import Driver
from bench_report import (
    WRONG_RESULT,
    cases_of,
    parser_of,
    provenance,
    publish,
    row_of,
    table_of,
)
from sm70_rig import Rig

from appliance.nvfp4.library import Library

LIBRARY = REPOSITORY / "appliance" / "lib" / "libnvfp4_sm70.so"
CLOCK_RATE, MULTIPROCESSORS, MAJOR, MINOR = 13, 16, 75, 76  # CUdevice_attribute
COPY_BYTES = 1 << 30
VOLTA = (7, 0)
NO_DEVICE = 2


def copy_gb_s(driver: Driver, rounds: int) -> float:
    """Bytes read and written a second by the driver's copy."""
    source, target = (driver.allocate(COPY_BYTES) for _ in range(2))
    us = driver.median_us(lambda: driver.copy(target, source, COPY_BYTES), rounds)
    driver.release(source)
    driver.release(target)
    return round(2 * COPY_BYTES / us / 1e3, 1)


def rows_of(
    driver: Driver, library: Library, case: str, rounds: int, rates: dict[str, float]
) -> list[dict[str, Any]]:
    """Every call of one case, checked, then timed.

    Raises:
        ArithmeticError: If a result is wrong; nothing of the call was timed.
    """
    rig = Rig(library, driver)
    rows = []
    for call in calls_of(rig, case):
        found = call.proved(case)
        rows.append(row_of(case, found, driver.median_us(call.run, rounds), rates))
    rig.release()
    return rows


def main() -> int:
    """Print a table and the document; 3 after a wrong result, 2 without a GPU."""
    parser = parser_of(__doc__)
    parser.add_argument("library", type=Path, nargs="?", default=LIBRARY)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the document here as well")
    options = parser.parse_args()
    # Translating the PTX of every kernel takes longer than the bench: only those that run.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    begin = time.monotonic()
    try:
        driver = Driver()
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"bench: no GPU: {error}\n")
        return NO_DEVICE
    library = Library(options.library.resolve())
    rates = {"copy": copy_gb_s(driver, options.rounds)}
    rows: list[dict[str, Any]] = []
    try:
        for case in cases_of(options, DEFAULT):
            rows += rows_of(driver, library, case, options.rounds, rates)
            sys.stderr.write(f"{time.monotonic() - begin:.1f} s\n{table_of(rows[-1:])}")
    except ArithmeticError as error:
        sys.stderr.write(f"bench: wrong result, refused: {error}\n")
        return WRONG_RESULT
    capability = (driver.attribute(MAJOR), driver.attribute(MINOR))
    document = {
        "machine": driver.name(),
        "compute_capability": "{}.{}".format(*capability),
        "emulated": capability != VOLTA,
        "method": f"median of {options.rounds}, L2 flushed, every result checked before its time",
        "clocks": {"core_mhz": driver.attribute(CLOCK_RATE) // 1000},
        "multiprocessors": driver.attribute(MULTIPROCESSORS),
        "driver_cuda": driver.version(),
        **provenance(options.library),
        "seconds": round(time.monotonic() - begin, 1),
        "gb_s": rates,
        "rows": rows,
    }
    publish(document, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
