"""Runs named checks in a process whose CUDA run time is the modelled V100; JSON on stdout.

Usage: sm70_run.py LIBRARY CASE...
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

# PYTHONSAFEPATH leaves a script's own folder out.
sys.path.insert(0, str(Path(__file__).parent))

from sm70_attention_cases import ATTENTION_CASES
from sm70_cases import CASES
from sm70_gdn_cases import GDN_CASES
from sm70_more_cases import MORE_CASES
from sm70_rig import CudartMemory, Rig

from appliance.nvfp4.library import Library


def main() -> int:
    library = Library(Path(sys.argv[1]))
    memory = CudartMemory()
    results = {}
    for name in sys.argv[2:]:
        rig = Rig(library, memory)
        try:
            (CASES | MORE_CASES | ATTENTION_CASES | GDN_CASES)[name](rig)
            results[name] = "ok"
        except Exception:  # noqa: BLE001 - the report is the product
            results[name] = traceback.format_exc()
        rig.release()
    sys.stdout.write("RESULTS " + json.dumps(results) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
