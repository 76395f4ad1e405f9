"""Rewrites the golden files from the code: `python tests/golden/update.py [--engine] [--check]`.

Whole outputs, never edited by hand. `--engine` also renews the list of vLLM's flags, for which it
imports vLLM (about 20 s). `--check` writes nothing and exits 1 if a file is out of date.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent
# As pytest has it; this is a script too.
sys.path.insert(0, str(GOLDEN.parent / "support"))

from modules import module_at  # noqa: E402 - found through the line above


def golden_files() -> dict[Path, str]:
    """Return every golden file that needs no engine, with its text."""
    from appliance.config.reference import reference_page, schema_text  # noqa: PLC0415

    files = {
        REPOSITORY / "config/appliance.schema.json": schema_text(),
        REPOSITORY / "docs/config.md": reference_page(),
    }
    cases = module_at(GOLDEN / "render/cases.py")
    for name, case in cases.CASES.items():
        for file, text in cases.outputs(case).items():
            files[GOLDEN / "render" / name / file] = text
    plans = module_at(GOLDEN / "plan/cases.py")
    for model in plans.CASES:
        for file, text in plans.outputs(model).items():
            files[GOLDEN / "plan" / file] = text
    return files


def engine_files() -> dict[Path, str]:
    """Return the list of vLLM's flags, asked of the installed vLLM."""
    script = GOLDEN / "engine_flags.py"
    listed = subprocess.run(
        (sys.executable, str(script)), check=True, capture_output=True, text=True
    )
    return {REPOSITORY / "appliance/config/vllm_flags.json": listed.stdout}


def main() -> int:
    """Write or check the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", action="store_true", help="also the list of vLLM's flags")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, exit 1 on a difference"
    )
    arguments = parser.parse_args()
    files = golden_files() | (engine_files() if arguments.engine else {})
    stale = [path for path, text in files.items() if not _equals(path, text)]
    for path in stale:
        print(path.relative_to(REPOSITORY))  # noqa: T201
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
    return 1 if arguments.check and stale else 0


def _equals(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
