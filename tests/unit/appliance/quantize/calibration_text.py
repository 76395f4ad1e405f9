"""Writes a calibration text: docstrings of Python's standard library, shuffled by a fixed seed.

python calibration_text.py FILE [BYTES]: ordinary English prose, on every machine with Python, and
not the language reference that perplexity.py measures on.
"""

from __future__ import annotations

import ast
import random
import sys
import sysconfig
from pathlib import Path

_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "pydoc_data", "lib2to3"}
_SHORTEST = 200


def docstrings() -> list[str]:
    """Docstrings of at least 200 letters, in the order of the files' names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[str] = []
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node) or ""
                if len(text) >= _SHORTEST:
                    found.append(text)
    return found


def main() -> None:
    """Write the file."""
    texts = docstrings()
    random.Random(0).shuffle(texts)  # noqa: S311 - the same order every time, no secret
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 400_000
    Path(sys.argv[1]).write_text("\n\n".join(texts)[:size], encoding="utf-8")


if __name__ == "__main__":
    main()
