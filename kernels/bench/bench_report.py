"""The rows of a bench report: rates from times, and where the sources stand."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


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
