"""The host as NVML sees it, read in a child: a wedged driver blocks its callers for ever.

Run as a module it is that child: one JSON line a step, so that the parent knows which GPU does not
answer.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from healthchecks.children import ChildTimeoutError, LineChild, child_environment, module_argv
from healthchecks.codec import from_plain, to_plain
from healthchecks.facts import GpuFacts, HostFacts, PairFacts
from healthchecks.nvml_read import Binding, Reader, error_name, read_gpu, read_pair

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NOT_ANSWERING = "timeout"
"""Read status under `*` of a GPU that did not answer in its time."""


class NvmlUnavailable(Exception):  # noqa: N818 - a state of the machine, named as the callers know it
    """NVML did not open.

    Attributes:
        kind: `driver_not_loaded`, `library_not_found`, `binding_not_found`, `timeout`,
            `no_permission`,
            `version_mismatch`, `unknown_error` or `error:N`.
        detail: NVML's own words, or how long was waited.
        stuck_pid: The reading child when it cannot be killed, which means that the driver itself
            hangs.
    """

    def __init__(self, kind: str, detail: str, stuck_pid: int | None = None) -> None:
        """Keep the parts; the message joins them."""
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
        self.stuck_pid = stuck_pid


def read_host(*, timeout_s: float, gpu_timeout_s: float) -> HostFacts:
    """Read every GPU and pair, in at most `timeout_s` seconds and `gpu_timeout_s` a GPU.

    A GPU that does not answer in its time comes back with the read status `timeout` under `*`; the
    others
    are read all the same.

    Raises:
        NvmlUnavailable: If NVML does not open, or the whole time is over before any GPU was listed.
    """
    session = _Session(time.monotonic() + timeout_s, gpu_timeout_s)
    while not session.done:
        session.round()
    return session.facts()


class _Session:
    """Rounds of children; each round leaves out the GPUs that hung before."""

    def __init__(self, deadline: float, gpu_timeout_s: float) -> None:
        self.done = False
        self._deadline = deadline
        self._gpu_timeout_s = gpu_timeout_s
        self._host: HostFacts | None = None
        self._count = 0
        self._gpus: dict[int, GpuFacts] = {}
        self._pairs: list[PairFacts] = []
        self._current: int | None = None
        self._stuck: list[int] = []

    def round(self) -> None:
        child = LineChild(
            module_argv("healthchecks.nvml", *map(str, self._hung())), child_environment()
        )
        try:
            while (line := child.next_line(self._patience())) is not None:
                self._take(json.loads(line))
            self._ended(child)
        except ChildTimeoutError:
            self._late()
        finally:
            if not child.stop():
                self._stuck.append(child.pid)
        if self._host is None:
            raise NvmlUnavailable(
                "timeout", "NVML did not open in time", next(iter(self._stuck), None)
            )

    def facts(self) -> HostFacts:
        host = self._host or HostFacts()
        for index in range(self._count):
            self._gpus.setdefault(index, _silent(index))
        gpus = tuple(self._gpus[index] for index in sorted(self._gpus))
        return replace(host, gpus=gpus, pairs=tuple(self._pairs), wedged_pids=tuple(self._stuck))

    def _hung(self) -> list[int]:
        return sorted(index for index, gpu in self._gpus.items() if "*" in gpu.read_status)

    def _patience(self) -> float:
        left = self._deadline - time.monotonic()
        return max(0.0, left if self._current is None else min(left, self._gpu_timeout_s))

    def _take(self, step: dict[str, Any]) -> None:
        if "error" in step:
            raise NvmlUnavailable(step["error"], step["detail"])
        if "host" in step:
            self._host = from_plain(HostFacts, step["host"])
            self._count = int(step["count"])
            self._pairs = []
        elif "begin" in step:
            self._current = int(step["begin"])
        elif "gpu" in step:
            gpu = from_plain(GpuFacts, step["gpu"])
            self._gpus[gpu.index] = gpu
            self._current = None
        elif "pair" in step:
            self._pairs.append(from_plain(PairFacts, step["pair"]))
        self.done = "end" in step

    def _ended(self, child: LineChild) -> None:
        """Tell a child that said all from one that died on the way."""
        if self.done:
            return
        status = child.finish(1.0)
        if self._current is None or self._host is None:
            raise NvmlUnavailable(
                "unknown_error", f"the reading child ended with {status}: {child.stderr_tail()}"
            )
        self._gpus[self._current] = replace(
            _silent(self._current), read_status={"*": f"crash:{status}"}
        )
        self._current = None

    def _late(self) -> None:
        if self._current is not None:
            self._gpus[self._current] = _silent(self._current)
            self._current = None
        elif self._host is not None:
            self.done = True  # it hangs between GPUs; what was read stands, the rest has no value
        self.done = self.done or time.monotonic() >= self._deadline


def _silent(index: int) -> GpuFacts:
    return GpuFacts(index=index, read_status={"*": NOT_ANSWERING})


def steps(nvml: Binding, skip: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield what the child says, one step a line; `skip` names GPUs that are left alone."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        yield {"error": error_name(int(error.value)), "detail": str(error)}
        return
    reader = Reader(nvml)
    host = HostFacts(
        driver_version=reader.read("driver", lambda: str(nvml.nvmlSystemGetDriverVersion())),
        nvml_version=reader.read("nvml", lambda: str(nvml.nvmlSystemGetNVMLVersion())),
    )
    count = reader.read("count", lambda: int(nvml.nvmlDeviceGetCount())) or 0
    yield {"host": to_plain(host), "count": count}
    read: list[GpuFacts] = []
    for index in (number for number in range(count) if number not in skip):
        yield {"begin": index}
        read.append(read_gpu(nvml, index))
        yield {"gpu": to_plain(read[-1])}
    for first, second in combinations(read, 2):
        yield {"pair": to_plain(read_pair(nvml, first, second))}
    yield {"end": True}


def binding() -> Binding:
    """Return the NVML binding of the package nvidia-ml-py.

    Raises:
        ImportError: If it is absent.
    """
    import pynvml  # type: ignore[import-untyped]  # noqa: PLC0415 - only the child pays for it

    return pynvml


def binding_version() -> str | None:
    """Return the version of nvidia-ml-py, None when it is not installed as a distribution."""
    try:
        return importlib.metadata.version("nvidia-ml-py")
    except importlib.metadata.PackageNotFoundError:
        return None


def main(arguments: Sequence[str]) -> int:
    """Write the steps on stdout; the arguments are the indexes to leave out."""
    try:
        nvml = binding()
    except ImportError as error:
        _say({"error": "binding_not_found", "detail": f"nvidia-ml-py: {error}"})
        return 1
    for step in steps(nvml, [int(word) for word in arguments]):
        _say(step)
    return 0


def _say(step: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(step) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
