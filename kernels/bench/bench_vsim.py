#!/usr/bin/env python3
"""Times the sm_70 library on the modelled V100, beside a copy and a read in the same run; JSON.

Each case runs in a process of its own (bench_model.py): every call is checked against FP32 products
of the exact weights, and a wrong one ends the bench before a time is taken. The library must be
linked with the shared CUDA run time. Figures are simulated, within about 15 %; never a measurement.

Usage: bench_vsim.py LIBRARY --vsim FOLDER [--only matmul:8x17408x5120,moe:1] [--json FILE]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# PYTHONSAFEPATH leaves a script's own folder out.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tests/kernels/vsim")]

from bench_cases import DEFAULT
from bench_on_model import StoppedError, launches_us, on_model
from bench_report import WRONG_RESULT, cases_of, parser_of, provenance, publish, row_of

CLOCKS = {"core_mhz": 1530, "memory_mhz": 877}
COPY_MIB = 200
"""A multiple of 5: the model's read program takes whole strides of 5 MiB. Large, since what a copy
wrote last stays in L2 uncounted."""


def with_clocks(vsim: Path, command: list[str]) -> str:
    """Output of a program on the model, whose clocks the report names."""
    parameters = f"clk={CLOCKS['core_mhz']},mem={CLOCKS['memory_mhz']}"
    return on_model(vsim, command, VSIM_PAR=parameters)


def ceilings(vsim: Path, mib: int) -> dict[str, float]:
    """GB/s of the model's own copy (bytes read and written) and read programs."""
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/copy"
        source = str(vsim / "examples" / "copy.cu")
        subprocess.run([str(vsim / "nvcc70"), "-o", program, source], check=True)
        report = with_clocks(vsim, [program, str(mib)])
    names = re.findall(r"^\[vsim\] (\S+) grid", report, re.MULTILINE)
    us = dict(zip(names, launches_us(report), strict=True))
    size = mib * 1.048576e3
    (copy,) = (time for name, time in us.items() if "copyk" in name)
    (read,) = (time for name, time in us.items() if "readk" in name)
    return {"copy": round(2 * size / copy, 1), "read": round(size / read, 1)}


def calls_of(vsim: Path, library: Path, case: str) -> list[dict[str, Any]]:
    """What bench_model.py says of every call of one case, checked and timed."""
    program = str(Path(__file__).parent / "bench_model.py")
    output = with_clocks(vsim, [sys.executable, program, str(library), case])
    lines = [line for line in output.splitlines() if line.startswith("ROW ")]
    return [{"case": case} | json.loads(line.removeprefix("ROW ")) for line in lines]


def main() -> int:
    """Print a table on stderr and the document on stdout; 3 after a wrong result."""
    parser = parser_of(__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("--vsim", type=Path, required=True)
    parser.add_argument("--copy-mib", type=int, default=COPY_MIB, help="a multiple of 5")
    parser.add_argument("--json", type=Path, help="write the document here as well")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    try:
        for case in cases_of(options, DEFAULT):
            found += calls_of(options.vsim, options.library, case)
            sys.stderr.write(f"{case}: checked and timed\n")
        rates = ceilings(options.vsim, options.copy_mib)
    except StoppedError as error:
        sys.stderr.write(f"bench: wrong result, refused: {error}\n")
        return WRONG_RESULT
    rows = [
        row_of(each["case"], each, sum(each["launches_us"]), rates)
        | {"launches_us": each["launches_us"]}
        for each in found
    ]
    document = {
        "machine": "simulated V100, +-15 %",
        "method": "second launch, cold L2, every result checked before its time",
        "clocks": CLOCKS,
        **provenance(options.library),
        "gb_s": rates,
        "rows": rows,
    }
    publish(document, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
