"""One case of the bench inside the process whose CUDA run time is the modelled V100.

Each call runs once and is checked; only a right one runs again and is timed: the model's report of
that second run is read from its log. JSON on stdout, a wrong result ends the process with 3.

Usage: bench_model.py LIBRARY CASE
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# PYTHONSAFEPATH leaves a script's own folder out.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tests/kernels/vsim")]

from bench_cases import calls_of
from bench_on_model import launches_us
from bench_report import WRONG_RESULT
from sm70_rig import CudartMemory, Rig

from appliance.nvfp4.library import Library


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
            return launches_us(report.read().decode())


def main() -> int:
    rig = Rig(Library(Path(sys.argv[1])), CudartMemory())
    log = Log(Path(os.environ["VSIM_LOG"]))
    for call in calls_of(rig, sys.argv[2]):
        try:
            row = call.proved(sys.argv[2])
        except ArithmeticError as error:
            sys.stderr.write(f"{error}\n")
            return WRONG_RESULT
        begin = log.size()
        call.run()
        row["launches_us"] = log.launches(begin)
        sys.stdout.write(f"ROW {json.dumps(row)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
