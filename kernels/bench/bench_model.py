"""One case of the bench inside the process whose CUDA run time is the modelled V100.

Each call runs once and is checked; only a right one runs again and is timed: the model's report of
that second run is read from its log. JSON on stdout, a wrong result ends the process with 3.

Usage: bench_model.py LIBRARY CASE
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

# PYTHONSAFEPATH leaves a script's own folder out.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tests/kernels/vsim")]

from bench_cases import calls_of
from sm70_rig import CudartMemory, Rig

from appliance.nvfp4.library import Library

WRONG_RESULT = 3


class Log:
    """The model's report of each launch, as it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def launches(self, begin: int) -> list[float]:
        """Microseconds of the launches reported past `begin` bytes."""
        with self._path.open("rb") as report:
            report.seek(begin)
            found = re.findall(r"cycles=\d+\s+t=([\d.]+)us", report.read().decode())
        return [float(us) for us in found]


def main() -> int:
    rig = Rig(Library(Path(sys.argv[1])), CudartMemory())
    log = Log(Path(os.environ["VSIM_LOG"]))
    for call in calls_of(rig, sys.argv[2]):
        call.run()
        error = call.error()
        if not error <= call.tolerance:
            sys.stderr.write(f"{sys.argv[2]} {call.name}: error {error:.2e}, not timed\n")
            return WRONG_RESULT
        begin = log.size()
        call.run()
        row = {
            "call": call.name,
            "launches_us": log.launches(begin),
            "error": float(f"{error:.2e}"),
            "weight_bytes": call.weight_bytes,
            "moved_bytes": call.moved_bytes,
            "flops": call.flops,
        }
        sys.stdout.write(f"ROW {json.dumps(row)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
