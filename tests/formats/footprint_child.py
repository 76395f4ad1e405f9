"""Reads files with one parser and prints what the process grew by: `KIND FILE...` -> JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from appliance.checkpoint.config import read_config
from appliance.checkpoint.container import read_container
from appliance.checkpoint.document import read_document
from appliance.checkpoint.header import HeaderError, read_header
from appliance.checkpoint.metadata import read_rules
from appliance.checkpoint.weight_map import parse_index
from appliance.errors import ApplianceError

READERS: dict[str, Callable[[Path], object]] = {
    "document": read_document,  # what it takes to parse, and no more
    "index": lambda path: read_document(path, parse_index),
    "header": read_header,
    "rules": lambda path: read_rules(read_config(path.parent)),
    "container": read_container,
}


def resident() -> int:
    """Return the most bytes of memory that this process ever had; rusage counts its parent in."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def main() -> None:
    """Be the child."""
    results: list[dict[str, object]] = []
    before = resident()
    for path in sys.argv[2:]:
        refused = ""
        try:
            READERS[sys.argv[1]](Path(path))
        except (ApplianceError, HeaderError) as error:
            refused = str(error)
        results.append({"grown": resident() - before, "refused": refused})
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
