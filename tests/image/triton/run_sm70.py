"""Runs Triton's sm_70 programs of FOLDER on the modelled V100 and compares what they write.

    vsim/run python3 run_sm70.py FOLDER

Each program's machine code is linked into a library of its own over the model's CUDA run time.
Prints `RESULTS` and, by program, "ok" or what is wrong.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray
HERE = Path(__file__).parent
RUNTIME = ctypes.CDLL("libcudart.so.11.0", mode=ctypes.RTLD_GLOBAL)
TO_DEVICE, TO_HOST = 1, 2
VOCABULARY, ROWS = 20_000, 9
BLOCK, PAD = 16, -1
CUT = 5e-4
"""The kernel halves an interval 18 times to find where top-p cuts, on every GPU: tokens of as good
as the same share may be on the other side, as long as they are less than this together."""


class Buffer:
    """Device memory that holds a host array."""

    def __init__(self, array: Array) -> None:
        self.array = np.ascontiguousarray(array)
        self.address = ctypes.c_void_p()
        check(RUNTIME.cudaMalloc(ctypes.byref(self.address), ctypes.c_size_t(self.array.nbytes)))
        self._copy(self.address, self.array.ctypes.data, TO_DEVICE)

    def get(self) -> Array:
        """What the device holds now."""
        self._copy(self.array.ctypes.data, self.address, TO_HOST)
        return self.array

    def _copy(self, to: Any, begin: Any, kind: int) -> None:
        begin, to = (ctypes.c_void_p(getattr(each, "value", each)) for each in (begin, to))
        check(RUNTIME.cudaMemcpy(to, begin, ctypes.c_size_t(self.array.nbytes), kind))


def check(status: int) -> None:
    assert status == 0, f"the CUDA run time answers {status}"


class Program:
    """One cubin, linked into a library that launches it."""

    def __init__(self, folder: Path, name: str, known: dict[str, Any]) -> None:
        self.known = known
        stem = folder / name.replace(" ", "_")
        cubin = (folder / f"{name}.cubin").rename(f"{stem}.cubin")
        tools = {"PATH": "/usr/bin:/bin"}
        image = f"--image3=kind=elf,sm=70,file={cubin}"
        subprocess.run(
            ("fatbinary", f"--create={stem}.fatbin", "-64", image), check=True, env=tools
        )
        names = (f'-DFATBIN="{stem}.fatbin"', f'-DFUNCTION="{known["function"]}"')
        out = ("-shared", "-fPIC", "-o", f"{stem}.so", str(HERE / "launcher.c"))
        subprocess.run(("gcc-11", *names, *out), check=True, env=tools)
        self.library = ctypes.CDLL(f"{stem}.so")

    def launch(self, grid: int, *arguments: Buffer | int) -> None:
        """Launch over a grid; behind its own arguments come two pointers to scratch, unused."""
        assert len(arguments) == len(self.known["arguments"])
        assert self.known["scratch"] == 0
        values = [
            each.address if isinstance(each, Buffer) else ctypes.c_int(each) for each in arguments
        ]
        values += [ctypes.c_void_p(), ctypes.c_void_p()]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        check(self.library.launch(grid, self.known["threads"], self.known["shared"], pointers))


def misplaced(logits: Array, stayed: Array, k: int | None, p: float | None) -> str:
    """What is wrong with the tokens of a row that stayed; nothing if they are those of k and p."""
    order = np.argsort(-logits, kind="stable")[: k or len(logits)]
    count = int(stayed.sum())
    if not stayed[order[:count]].all():
        return "a token stays and a likelier one does not"
    if p is None:
        return "" if count == len(order) else f"{count} stay"
    shares = np.exp(logits[order].astype(np.float64) - logits.max())
    shares /= shares.sum()
    right = int((np.cumsum(shares) - shares < p).sum())
    off = abs(float(shares[:count].sum() - shares[:right].sum()))
    return "" if off < CUT else f"{count} stay, right are {right}: {off:.1e} of the mass"


def sampled(program: Program, tables: list[list[float]], top_k: bool, top_p: bool) -> str:
    """Rows of every k and p at once: outside of what stays there must be -inf, inside the logit."""
    numbers = np.random.default_rng(70)
    logits = (numbers.standard_normal((ROWS, VOCABULARY)) * 3).astype(np.float32)
    ks = np.array([1, 2, 20, 50, 1000, VOCABULARY, 7, 333, 4096], np.int32)
    ps = np.array([0.9, 0.5, 0.95, 0.1, 0.8, 0.9, 1.0, 0.3, 0.99], np.float32)
    held = Buffer(logits.copy())
    scratch = Buffer(np.zeros((ROWS, VOCABULARY), np.float32))
    lookups = [Buffer(np.array(table, np.float32)) for table in tables]
    program.launch(
        ROWS, held, VOCABULARY, scratch, *lookups,
        Buffer(ks) if top_k else held, Buffer(ps) if top_p else held, ROWS,
    )  # fmt: skip
    found = held.get()
    for row in range(ROWS):
        k, p = int(ks[row]) if top_k else None, float(ps[row]) if top_p else None
        stayed = np.isfinite(found[row])
        if wrong := misplaced(logits[row], stayed, k, p):
            return f"row {row}, k {k}, p {p}: {wrong}"
        if not np.array_equal(found[row][stayed], logits[row][stayed]):
            return f"row {row}: a logit that stays has changed"
    return "ok"


def slots(program: Program) -> str:
    """Slots of three sequences' tokens; what is behind them is padded."""
    counts, starts = [1, 1300, 33], [70, 0, 5]
    query = np.cumsum([0, *counts]).astype(np.int32)
    positions = np.concatenate([s + np.arange(c) for s, c in zip(starts, counts, strict=True)])
    table = np.random.default_rng(7).permutation(3 * 96).reshape(3, 96).astype(np.int32)
    most = 2048
    mapping = Buffer(np.full(most, 77, np.int64))
    program.launch(
        len(counts) + 1, int(query[-1]), most, Buffer(query), Buffer(positions.astype(np.int64)),
        Buffer(table), table.shape[1], BLOCK, mapping,
    )  # fmt: skip
    rows = np.repeat(np.arange(len(counts)), counts)
    right = np.full(most, PAD, np.int64)
    right[: query[-1]] = (
        table[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    )
    wrong = np.flatnonzero(mapping.get() != right)
    return "ok" if not wrong.size else f"slot {wrong[0]} is {mapping.array[wrong[0]]}"


def zeros(program: Program) -> str:
    """Two segments with pages of 3 and 2 chunks: the named blocks become zero and no other."""
    chunk, sizes, blocks = 1024, [3 * 1024, 2 * 1024], 6
    pages = [Buffer(np.full((blocks, size), 7, np.int32)) for size in sizes]
    named = np.array([4, 1], np.int64)
    addresses = np.array([page.address.value for page in pages], np.int64)
    grid = len(named) * len(sizes) * max(sizes) // chunk
    program.launch(
        grid, Buffer(addresses), Buffer(np.array(sizes, np.int64)), Buffer(named), len(named)
    )
    for page in pages:
        found = page.get()
        right = np.full_like(found, 7)
        right[named] = 0
        if not np.array_equal(found, right):
            return f"{(found != right).sum()} words are wrong"
    return "ok"


def main() -> None:
    """Run every program."""
    folder = Path(sys.argv[1])
    known = json.loads((folder / "programs.json").read_text())
    tables = known["tables"]
    runs: dict[str, Callable[[Program], str]] = {
        "slots": slots,
        "zeros": zeros,
        "top_k": lambda program: sampled(program, tables, True, False),
        "top_p": lambda program: sampled(program, tables, False, True),
        "top_k and top_p": lambda program: sampled(program, tables, True, True),
    }
    results = {}
    for name, details in known["programs"].items():
        results[name] = runs[name](Program(folder, name, details))
    sys.stdout.write("RESULTS " + json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
