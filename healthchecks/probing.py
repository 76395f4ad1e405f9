"""Runs the CUDA probes in children with hard deadlines and puts what they saw into the facts."""

from __future__ import annotations

import importlib.util
import json
import signal
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthchecks.children import ChildTimeoutError, LineChild, child_environment, module_argv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from healthchecks.facts import GpuFacts, PairFacts

SMALL_BYTES, LARGE_BYTES = 4096, 16 * 1024**2
"""Tensors of the all-reduce: one that is all latency, one that is all bandwidth."""


@dataclass(frozen=True)
class Told:
    """What a child said before it ended, and how it ended.

    Attributes:
        steps: Its lines.
        end: `done`, `hang`, `crash` or `stuck`: the last when it cannot be killed.
        signal_name: The signal that ended it, empty without one.
        pid: Its process id.
    """

    steps: tuple[dict[str, Any], ...] = ()
    end: str = "done"
    signal_name: str = ""
    pid: int = 0
    errors: str = ""

    def value(self, key: str) -> Any:  # noqa: ANN401 - JSON
        """Return the last value said under a key, None without one."""
        return next((step[key] for step in reversed(self.steps) if key in step), None)


@dataclass
class _Run:
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    end: str = "done"


def listen(argv: Sequence[str], timeout_s: float, device: str | None = None) -> Told:
    """Run a child to its end or its deadline; `device` is then the only GPU that it sees."""
    deadline = time.monotonic() + timeout_s
    child, run, status = LineChild(argv, _environment(device)), _Run(), None
    try:
        while (line := child.next_line(deadline - time.monotonic())) is not None:
            run.steps.append(json.loads(line))
        status = child.finish(max(0.5, deadline - time.monotonic()))
    except ChildTimeoutError:
        run.end = "hang"
    errors = child.stderr_tail()
    if not child.stop():
        run.end = "stuck"
    name = ""
    if status is None and run.end == "done":
        run.end = "hang"
    elif status:
        run.end, name = "crash", _signal(status)
    return Told(tuple(run.steps), run.end, name, child.pid, errors)


def _environment(device: str | None) -> dict[str, str]:
    """Show a probe one GPU, or all of them: then it names them by bus id, not by order."""
    env = child_environment()
    env.pop("CUDA_VISIBLE_DEVICES", None)
    return env if device is None else {**env, "CUDA_VISIBLE_DEVICES": device}


def _signal(status: int) -> str:
    number = -status if status < 0 else status - 128
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"exit status {status}"


def probe_gpu(gpu: GpuFacts, timeout_s: float) -> tuple[GpuFacts, int]:
    """Prove CUDA on one GPU and measure its link; the number is the pid of a stuck child, or 0."""
    if gpu.bus_id is None:
        return gpu, 0
    told = listen(module_argv("healthchecks.cuda_child", "gpu", gpu.bus_id), timeout_s)
    alloc = told.value("alloc")
    if alloc is None or (told.end != "done" and alloc == "ok" and told.value("link") is None):
        alloc = _why_not(told)
    link: dict[str, Any] = told.value("link") or {}
    return replace(
        gpu, alloc=alloc, pcie=replace(gpu.pcie, **link)
    ), told.pid if told.end == "stuck" else 0


def probe_selftest(gpu: GpuFacts, library: Path, timeout_s: float) -> tuple[GpuFacts, int]:
    """Let the kernel library test itself on one GPU; the number is that of a stuck child, or 0."""
    argv = module_argv("healthchecks.selftest_child", str(library))
    told = listen(argv, timeout_s, device=gpu.uuid)
    stuck = told.pid if told.end == "stuck" else 0
    return replace(gpu, selftest=str(told.value("selftest") or _why_not(told))), stuck


def _why_not(told: Told) -> str:
    if error := told.value("error"):
        return str(error)
    if told.end in ("hang", "stuck"):
        return "no answer in time"
    last_line = told.errors.rpartition("\n")[2]
    return " ".join(filter(None, (told.end, told.signal_name, last_line)))


def probe_pair(
    pair: PairFacts, first: GpuFacts, second: GpuFacts, size: int, timeout_s: float
) -> tuple[PairFacts, int]:
    """Copy between two GPUs and compare, both ways; the number is that of a stuck child, or 0."""
    if first.bus_id is None or second.bus_id is None:
        return pair, 0
    words = ("pair", first.bus_id, second.bus_id, str(size))
    told = listen(module_argv("healthchecks.cuda_child", *words), timeout_s)
    outcome, detail = _pair_outcome(told, timeout_s)
    rates = [float(step["rate"]) for step in told.steps if "rate" in step]
    found = replace(
        pair,
        functional=outcome,
        functional_detail=detail,
        functional_gb_s=min(rates, default=None) if outcome == "ok" else None,
    )
    return found, told.pid if told.end == "stuck" else 0


def _pair_outcome(told: Told, timeout_s: float) -> tuple[str | None, str]:
    where = str(told.value("begin") or "opening the contexts")
    if told.end in ("hang", "stuck"):
        return "hang", f"{where}: no end in {timeout_s:g} s"
    if told.end == "crash":
        return "crash", f"{where}: {told.signal_name}"
    if error := told.value("error"):
        started = told.value("begin") is not None
        return ("error", f"{where}: {error}") if started else (None, str(error))
    return told.value("outcome"), str(told.value("detail") or "")


def has_torch() -> bool:
    """Tell whether the engine's own PyTorch is there to run an all-reduce with."""
    return importlib.util.find_spec("torch") is not None


def probe_collective(
    uuids: tuple[str, str], timeout_s: float, *, p2p: bool, backend: str = "nccl"
) -> tuple[str, str]:
    """Run a two-rank all-reduce in two children; returns the outcome and its detail.

    The outcome is `ok`, `mismatch`, `hang`, `crash`, `error`, or `unavailable` where PyTorch has no
    CUDA.
    """
    deadline = time.monotonic() + timeout_s
    env = {} if p2p else {"NCCL_P2P_DISABLE": "1"}
    with tempfile.TemporaryDirectory(prefix="gate-") as folder:
        store = str(Path(folder) / "store")
        words = [(str(rank), store, backend, str(SMALL_BYTES), str(LARGE_BYTES)) for rank in (0, 1)]
        children = [
            LineChild(
                module_argv("healthchecks.collective_child", *words[rank]),
                {**child_environment(env), "CUDA_VISIBLE_DEVICES": ",".join(uuids)},
            )
            for rank in (0, 1)
        ]
        ends = [_rank_end(child, deadline) for child in children]
        for child in children:
            child.stop()
    return _worst_rank(ends, timeout_s)


def _rank_end(child: LineChild, deadline: float) -> tuple[str, str]:
    steps: list[dict[str, Any]] = []
    try:
        while (line := child.next_line(max(0.0, deadline - time.monotonic()))) is not None:
            steps.append(json.loads(line))
    except ChildTimeoutError:
        return "hang", f"after {steps[-1] if steps else 'nothing'}"
    status = child.finish(max(1.0, deadline - time.monotonic()))
    if status is None:
        return "hang", "the process does not end"
    if status < 0:
        return "crash", _signal(status)
    said = next((step for step in reversed(steps) if "outcome" in step), None)
    if said is None:
        return "error", child.stderr_tail().rpartition("\n")[2] or f"exit status {status}"
    return str(said["outcome"]), str(said.get("detail", ""))


def _worst_rank(ends: Sequence[tuple[str, str]], timeout_s: float) -> tuple[str, str]:
    """A rank that crashed explains a peer that waits for it."""
    for outcome in ("crash", "mismatch", "error", "hang", "unavailable"):
        for rank, (found, detail) in enumerate(ends):
            if found == outcome:
                limit = f" in {timeout_s:g} s" if outcome == "hang" else ""
                return outcome, f"rank {rank}{limit}: {detail}"
    return "ok", ends[0][1]
