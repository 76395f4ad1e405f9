#!/usr/bin/env python3
"""Audits the machine code of libnvfp4_sm70.so against its design, from what cuobjdump says.

Prints one table, a line a kernel, and names each kernel that breaks a rule: sm_70 code and
compute_70 PTX for all, no local memory, registers, shared memory and occupancy as designed,
tensor-core and wide-load counts, no barrier in a skinny main loop, no atomics in a product, at most
36 / 42 / 63 instructions for eight weights at 8 / 16 / 32 tokens. Counts that depend on tuning are
compared with a golden file; --update writes it again, and a person reads the difference.

    audit.py LIBRARY --sources kernels/src [--golden FILE [--update]]

Exit code 0: as designed. 1: a rule is broken or the table differs. 2: could not be audited.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

# PYTHONSAFEPATH leaves a script's own folder out.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine_code import AuditError, read_kernels
from rules import Finding, faults_of, table_of
from shared_memory import dynamic_shared


def main() -> int:
    """Audit what the command line names; return the exit code."""
    options = parse()
    try:
        findings = read(options)
    except AuditError as error:
        sys.stderr.write(f"audit: {error}\n")
        return 2
    text = table_of(findings)
    sys.stdout.write(text)
    faults = [f"{each.kernel.title}: {fault}" for each in findings for fault in faults_of(each)]
    if options.golden and options.update:
        options.golden.parent.mkdir(parents=True, exist_ok=True)
        options.golden.write_text(text)
    elif options.golden:
        faults += differences(options.golden, text)
    for fault in faults:
        sys.stderr.write(f"audit: {fault}\n")
    return 1 if faults else 0


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path, help="libnvfp4_sm70.so, or an object file")
    parser.add_argument("--sources", type=Path, help="the folder with the kernels' headers")
    parser.add_argument("--nvcc", default="/usr/bin/nvcc", help="nvcc 11.8")
    parser.add_argument("--host", default="g++-11", help="host compiler of nvcc")
    parser.add_argument("--golden", type=Path, help="the table as reviewed")
    parser.add_argument("--update", action="store_true", help="write the golden file")
    return parser.parse_args()


def read(options: argparse.Namespace) -> list[Finding]:
    """Every kernel with its shared memory; without sources only what is static counts."""
    if not options.library.is_file():
        raise AuditError(f"{options.library} is no file")
    kernels = read_kernels(options.library)
    sizes = [0] * len(kernels)
    if options.sources:
        sizes = dynamic_shared(kernels, options.sources, options.nvcc, options.host)
    return [Finding(kernel, size) for kernel, size in zip(kernels, sizes, strict=True)]


def differences(golden: Path, text: str) -> list[str]:
    """What differs from the golden file, line by line."""
    if not golden.is_file():
        return [f"{golden} is missing; write it with --update"]
    lines = difflib.unified_diff(
        golden.read_text().splitlines(), text.splitlines(), "golden", "now", lineterm="", n=0
    )
    found = [line for line in lines if not line.startswith("@@")]
    if found:
        found.insert(0, f"the table differs from {golden}; read it, then run with --update")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
