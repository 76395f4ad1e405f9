"""What the engine needs of the machine and would miss only after minutes of loading.

Shared memory for the queues between its processes, its cache directories, a C compiler where Triton
builds kernels, and storage that is fast enough for the start deadline.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import Fault
from appliance.serve.engine_cache import cache_root
from appliance.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from appliance.plan.launch_plan import LaunchPlan
    from appliance.serve.events import EventLog

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
"""Variables that name further directories which the engine writes to."""

COMPILERS = ("gcc", "clang")
"""What Triton looks for, in its order, unless CC names one."""

SHM = Path("/dev/shm")  # noqa: S108 - where the engine itself makes its queues
SHM_FIX = (
    "set memory.shm_size to 16GiB and recreate the container with `appliance up`, "
    "or give `docker run` --shm-size=16g"
)
QUEUE_CHUNKS = 10
CALL_CHUNK_BYTES = 16 * MIB
ANSWER_CHUNK_BYTES = 24 * MIB
"""vLLM 0.27.1: a queue to all workers and one back from each, of so many chunks of so many bytes.

It refuses to make a queue larger than what is free, and takes pages of it only as they are written.
"""

_TOUCHED_BYTES = MIB  # what the queues made before the largest one have taken by then, and more
COMPILER_S = 30.0
READ_BYTES = GIB
READ_S = 10.0
_STEP = 8 * MIB


@dataclass(frozen=True)
class Reading:
    """A part of the checkpoint that was read: bytes, seconds, and the size of all of it."""

    read: int
    seconds: float
    total: int

    @property
    def load_s(self) -> float:
        """Seconds that reading everything takes at this rate."""
        return self.total * self.seconds / self.read if self.read else 0.0


def missing_prerequisite(
    plan: LaunchPlan, environ: Mapping[str, str], log: EventLog
) -> Fault | None:
    """Return the first thing that the engine would miss, None if nothing is missing."""
    fault = small_shm(plan) or unwritable_cache(environ)
    if fault is None and plan.execution.device == "cuda":
        fault = missing_compiler(environ)
    return slow_storage(plan, log) if fault is None else fault


def queue_bytes(ranks: int) -> int:
    """Return the size of the largest queue of an engine of so many workers."""
    calls = (CALL_CHUNK_BYTES + 1 + ranks) * QUEUE_CHUNKS
    return max(calls, (ANSWER_CHUNK_BYTES + 2) * QUEUE_CHUNKS)


def small_shm(plan: LaunchPlan, path: Path = SHM) -> Fault | None:
    """Hold what is free of /dev/shm against the queues; one GPU alone has none."""
    ranks = plan.parallel.ranks
    if (plan.execution.device != "cpu" and ranks == 1) or not path.is_dir():
        return None
    free, need = shutil.disk_usage(path).free, queue_bytes(ranks) + _TOUCHED_BYTES
    if free >= need:
        return None
    what = f"{_whole_mib(need)} MiB free for the queues between the engine's processes"
    return Fault("SHM_TOO_SMALL", str(path), what, f"{free // MIB} MiB", SHM_FIX)


def _whole_mib(size: int) -> int:
    return -(-size // MIB)


def unwritable_cache(environ: Mapping[str, str]) -> Fault | None:
    """Write a file in every directory that the engine caches in."""
    named = [Path(environ[name]) for name in CACHES if environ.get(name)]
    for path in (cache_root(environ), *named):
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path) as file:
                file.write(b"1")
        except OSError as error:
            what = f"a directory that user {os.getuid()} may write to"
            fix = "mount a volume there, or give it to the user or group of the container"
            value = error.strerror or str(error)
            return Fault("CACHE_NOT_WRITABLE", f"path={path}", what, value, fix)
    return None


def missing_compiler(environ: Mapping[str, str]) -> Fault | None:
    """Compile one line as Triton does for its launcher: the compiler, libc and Python's headers."""
    where, fix = "Triton", "use an image with gcc, libc6-dev and Python's headers"
    names = (environ["CC"],) if environ.get("CC") else COMPILERS
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        what = "a C compiler for its launcher"
        return Fault("NO_CC", where, what, f"no {' or '.join(names)}", fix)
    source = b"#include <stdlib.h>\n#include <Python.h>\n"
    words = (found, "-fsyntax-only", f"-I{sysconfig.get_path('include')}", "-x", "c", "-")
    try:
        done = subprocess.run(
            words, input=source, capture_output=True, timeout=COMPILER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Fault("NO_CC", where, "a C compiler that works", str(error)[:200], fix)
    if done.returncode == 0:
        return None
    said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing said"]
    return Fault("NO_CC", where, "a C compiler with its headers", said[0][:200], fix)


def slow_storage(
    plan: LaunchPlan, log: EventLog, read: Callable[[Path], Reading] | None = None
) -> Fault | None:
    """Read a part of the checkpoint and hold the time for all of it against the start deadline."""
    reading = (read or read_some)(Path(plan.model.path))
    budget_s = plan.run.startup_timeout_s
    rate = format_bytes(int(reading.read / max(reading.seconds, 1e-3)))
    log.info("storage.estimate", load_s=round(reading.load_s), rate=f"{rate}/s", budget_s=budget_s)
    if reading.load_s <= budget_s:
        return None
    what = f"to be read within startup.timeout, budget={budget_s:g} s"
    value = f"est={reading.load_s:.0f} s for {format_bytes(reading.total)} at {rate}/s"
    fix = "raise startup.timeout, or put the checkpoint on faster storage"
    return Fault("SLOW_STORAGE", plan.model.path, what, value, fix)


def read_some(
    path: Path,
    *,
    limit: int = READ_BYTES,
    limit_s: float = READ_S,
    clock: Callable[[], float] = time.monotonic,
) -> Reading:
    """Read shards until so many bytes or seconds; what is read stays in the page cache.

    A file that cannot be read ends it: the engine says more about it.
    """
    files = sorted(path.glob("*.safetensors"))
    read, began = 0, clock()
    try:
        total = sum(file.stat().st_size for file in files)
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while read < limit and clock() - began < limit_s and (step := stream.read(_STEP)):
                    read += len(step)
    except OSError:
        return Reading(0, 0.0, 0)
    return Reading(read, clock() - began, total)
