"""One rank of a two-rank all-reduce: `RANK STORE BACKEND BYTES...`; one JSON line a step on stdout.

It runs with whatever PyTorch the engine uses and is started only where one is installed.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

UNAVAILABLE = "unavailable"
"""Outcome of a PyTorch that cannot run the test, such as one without CUDA."""

_WORLD = 2
_HALF_BYTES = 2
_ROUNDS = 3


def main(arguments: Sequence[str]) -> int:
    """Join the group, reduce each size and check the sums."""
    rank, store, backend, *sizes = arguments
    torch: Any = importlib.import_module("torch")
    if backend == "nccl" and torch.cuda.device_count() < _WORLD:
        _say({"outcome": UNAVAILABLE, "detail": "this PyTorch sees no two GPUs"})
        return 0
    device = torch.device("cuda", int(rank)) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    distributed: Any = importlib.import_module("torch.distributed")
    _say({"step": "joining"})
    distributed.init_process_group(
        backend, init_method=f"file://{store}", rank=int(rank), world_size=_WORLD
    )
    times: list[str] = []
    for size in (int(text) for text in sizes):
        _say({"step": f"reducing {size} bytes"})
        wrong, micros = _reduce(torch, distributed, device, int(rank), size)
        if wrong is not None:
            _say({"outcome": "mismatch", "detail": f"{size} bytes: wrong sum at element {wrong}"})
            return 0
        times.append(f"{size} bytes {micros:.0f} us")
    distributed.destroy_process_group()
    _say({"outcome": "ok", "detail": ", ".join(times)})
    return 0


def _reduce(
    torch: Any,  # noqa: ANN401 - the module is looked up at run time
    distributed: Any,  # noqa: ANN401
    device: Any,  # noqa: ANN401
    rank: int,
    size: int,
) -> tuple[int | None, float]:
    """Return the first wrong element, None without one, and the best time in microseconds."""
    count = size // _HALF_BYTES
    # Every element differs from its neighbours and every sum is exact in FP16.
    base = torch.arange(count, device=device) % 512
    best = float("inf")
    for _ in range(_ROUNDS):
        mine = (base + rank).to(torch.float16)
        started = time.perf_counter()
        distributed.all_reduce(mine)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
        wrong = (mine != (2 * base + 1).to(torch.float16)).nonzero()
        if wrong.numel():
            return int(wrong[0].item()), best * 1e6
    return None, best * 1e6


def _say(step: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(step) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
