"""What every bench says and is asked: rows with rates, where the sources stand, the options."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
WRONG_RESULT = 3
"""Exit code of a bench that found one."""


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """The options of every bench; the docstring of its script is the help."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="cases, comma-separated")
    return parser


def cases_of(options: argparse.Namespace, default: tuple[str, ...]) -> tuple[str, ...]:
    """The cases that are asked for."""
    return tuple(options.only.split(",")) if options.only else default


def row_of(case: str, found: dict[str, Any], us: float, rates: dict[str, float]) -> dict[str, Any]:
    """One call: time, rates, and its share of what the same run measured.

    Args:
        case: As in bench_cases.py.
        found: The fields of a Call but its functions.
        us: Microseconds of all launches of the call.
        rates: GB/s by name, "copy" and perhaps "read", measured in the same run.
    """
    row: dict[str, Any] = {"case": case, "call": found["call"], "us": round(us, 2)}
    row["error"] = found["error"]
    if found["weight_bytes"]:
        row["weight_gb_s"] = round(found["weight_bytes"] / us / 1e3, 1)
        row["moved_gb_s"] = round(found["moved_bytes"] / us / 1e3, 1)
        row["share_of_copy"] = round(found["moved_bytes"] / us / 1e3 / rates["copy"], 3)
        if "read" in rates:
            row["share_of_read"] = round(found["weight_bytes"] / us / 1e3 / rates["read"], 3)
    if found["flops"]:
        row["tflops"] = round(found["flops"] / us / 1e6, 2)
    return row


def sources_sha256() -> str:
    """Of every file below kernels/src, kernels/common and kernels/include, names included."""
    digest = hashlib.sha256()
    for folder in ("src", "common", "include"):
        for path in sorted((REPOSITORY / "kernels" / folder).rglob("*")):
            if path.is_file():
                digest.update(f"{path.relative_to(REPOSITORY)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """Of one file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def table_of(rows: list[dict[str, Any]]) -> str:
    """The rows for a reader."""
    columns = ("case", "call", "us", "weight_gb_s", "moved_gb_s", "tflops")
    columns += ("share_of_read", "share_of_copy", "error")
    lines = [columns, *(tuple(str(row.get(name, "-")) for name in columns) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        + "\n"
        for line in lines
    )


def provenance(library: Path) -> dict[str, str]:
    """When, of which sources, and with which library."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "sources_sha256": sources_sha256(),
        "library_sha256": sha256_of(library),
    }


def publish(document: dict[str, Any], path: Path | None) -> None:
    """The rows as a table on stderr; the document on stdout, and in a file if one is asked for."""
    text = json.dumps(document, indent=1) + "\n"
    sys.stderr.write("\n" + table_of(document["rows"]))
    sys.stdout.write(text)
    if path:
        path.write_text(text)
