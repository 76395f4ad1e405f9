"""The child that touches CUDA: one JSON line a step on stdout, so that a hang has a name.

`python -m healthchecks.cuda_child gpu BUS_ID` proves one GPU and measures its link under load;
`python -m healthchecks.cuda_child pair BUS_ID BUS_ID BYTES` copies between two GPUs and compares.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import TYPE_CHECKING, Any

from healthchecks.cuda_driver import CudaError, Driver
from healthchecks.kernel_log import short_bus
from healthchecks.nvml import binding
from healthchecks.nvml_read import Reader, read_pcie

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator, Sequence

    from healthchecks.facts import PcieFacts

PROOF_BYTES = 1024**2
LOAD_BYTES = 64 * 1024**2
LOAD_ROUNDS = 8
COPIES_A_ROUND = 4
_THREADS = 256

# Each thread moves 8 bytes with a plain load and store, which is how collectives write to a peer.
STORE_PTX = """
.version 6.0
.target sm_70
.address_size 64
.visible .entry move_words(.param .u64 to, .param .u64 from, .param .u64 words)
{
  .reg .pred %p;
  .reg .b32 %r<4>;
  .reg .b64 %d<8>;
  ld.param.u64 %d1, [to];
  ld.param.u64 %d2, [from];
  ld.param.u64 %d3, [words];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.wide.u32 %d4, %r1, %r2, 0;
  cvt.u64.u32 %d5, %r3;
  add.u64 %d4, %d4, %d5;
  setp.ge.u64 %p, %d4, %d3;
  @%p bra done;
  shl.b64 %d4, %d4, 3;
  add.u64 %d1, %d1, %d4;
  add.u64 %d2, %d2, %d4;
  ld.global.u64 %d6, [%d2];
  st.global.u64 [%d1], %d6;
done:
  ret;
}
"""

Step = dict[str, Any]


def prove_gpu(driver: Driver, bus_id: str) -> Iterator[Step]:
    """Yield the outcome of a context and 1 MiB there and back, then the link under load."""
    driver.context(driver.device(bus_id))
    data = random.Random(bus_id).randbytes(PROOF_BYTES)  # noqa: S311 - a pattern, not a secret
    address = driver.allocate(PROOF_BYTES)
    driver.upload(address, data)
    same = driver.download(address, PROOF_BYTES) == data
    yield {"alloc": "ok" if same else "1 MiB came back changed"}
    yield {"link": load_link(driver, bus_id)}


def load_link(driver: Driver, bus_id: str) -> Step:
    """Return rate and the best link state while host memory streams to the GPU."""
    target, source = driver.allocate(LOAD_BYTES), driver.pinned(LOAD_BYTES)
    sample = _sampler(bus_id)
    before = sample()
    best_gb_s, width, generation = 0.0, 0, 0
    for _ in range(LOAD_ROUNDS):
        started = time.perf_counter()
        for _ in range(COPIES_A_ROUND):
            driver.upload_later(target, source, LOAD_BYTES)
        during = sample()
        driver.synchronize()
        gb_s = COPIES_A_ROUND * LOAD_BYTES / (time.perf_counter() - started) / 1e9
        best_gb_s = max(best_gb_s, gb_s)
        width = max(width, during.width or 0)
        generation = max(generation, during.generation or 0)
    after = sample()
    grown = (
        None
        if None in (before.replays, after.replays)
        else (after.replays or 0) - (before.replays or 0)
    )
    return {
        "loaded_gb_s": round(best_gb_s, 2),
        "loaded_width": width or None,
        "loaded_generation": generation or None,
        "replays_during_load": grown,
    }


class _sampler:  # noqa: N801 - called like the function it stands for
    """Reads the link of one GPU through NVML."""

    def __init__(self, bus_id: str) -> None:
        self._nvml = binding()
        self._nvml.nvmlInit()
        self._handle = None
        for index in range(self._nvml.nvmlDeviceGetCount()):
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            found = self._nvml.nvmlDeviceGetPciInfo(handle).busId
            found = found.decode() if isinstance(found, bytes) else found
            if short_bus(found) == short_bus(bus_id):
                self._handle = handle

    def __call__(self) -> PcieFacts:
        return read_pcie(Reader(self._nvml), self._handle)


def prove_pair(driver: Driver, first: str, second: str, size: int) -> Iterator[Step]:
    """Yield each direction as it begins and its rate once the data was found unchanged."""
    devices = [driver.device(bus_id) for bus_id in (first, second)]
    contexts = [driver.context(device) for device in devices]
    if not all(driver.peer_access(a, b) for a, b in (devices, devices[::-1])):
        yield {"outcome": "no_access"}
        return
    buffers: list[int] = []
    for context, peer in (contexts, contexts[::-1]):
        driver.enter(context)
        driver.enable_peer(peer)
        buffers.append(driver.allocate(size))
    for source, target in ((0, 1), (1, 0)):
        for kind in ("copy", "store"):
            name = f"{kind} {'a->b' if source == 0 else 'b->a'}"
            yield {"begin": name}
            pair = _Direction(
                driver, contexts[source], contexts[target], buffers[source], buffers[target]
            )
            wrong, gb_s = pair.copy(size) if kind == "copy" else pair.store(size)
            if wrong is not None:
                yield {
                    "outcome": "mismatch",
                    "detail": f"{name}: first wrong byte at {wrong} of {size}",
                }
                return
            yield {"rate": gb_s}
    yield {"outcome": "ok"}


class _Direction:
    """One direction between two contexts: fill both ends differently, move, read back, compare."""

    def __init__(
        self,
        driver: Driver,
        source_context: ctypes.c_void_p,
        target_context: ctypes.c_void_p,
        source: int,
        target: int,
    ) -> None:
        self._driver = driver
        self._source_context, self._target_context = source_context, target_context
        self._source, self._target = source, target

    def copy(self, size: int) -> tuple[int | None, float]:
        """Let the copy engines move the bytes."""
        return self._moved(size, self._copy)

    def store(self, size: int) -> tuple[int | None, float]:
        """Let a kernel on the source write into the target's memory."""
        return self._moved(size, self._store)

    def _moved(self, size: int, move: Any) -> tuple[int | None, float]:  # noqa: ANN401 - a bound method
        data = random.Random(size).randbytes(size)  # noqa: S311 - a pattern, not a secret
        self._driver.enter(self._target_context)
        self._driver.upload(self._target, bytes(size))
        self._driver.enter(self._source_context)
        self._driver.upload(self._source, data)
        self._driver.synchronize()
        started = time.perf_counter()
        move(size)
        self._driver.synchronize()
        gb_s = size / (time.perf_counter() - started) / 1e9
        self._driver.enter(self._target_context)
        return first_difference(self._driver.download(self._target, size), data), round(gb_s, 2)

    def _copy(self, size: int) -> None:
        ends = (self._target, self._target_context, self._source, self._source_context)
        self._driver.copy_peer(*ends, size)

    def _store(self, size: int) -> None:
        kernel = self._driver.function(STORE_PTX, "move_words")
        words = size // 8
        blocks = (words + _THREADS - 1) // _THREADS
        self._driver.launch(kernel, blocks, _THREADS, (self._target, self._source, words))


def first_difference(found: bytes, wanted: bytes) -> int | None:
    """Return the first offset at which two byte strings of one length differ."""
    if found == wanted:
        return None
    step = 4096
    block = next(
        at for at in range(0, len(wanted), step) if found[at : at + step] != wanted[at : at + step]
    )
    return next(at for at in range(block, block + step) if found[at] != wanted[at])


def main(arguments: Sequence[str]) -> int:
    """Write the steps on stdout; a refused call is a step too."""
    mode, *rest = arguments
    try:
        driver = Driver()
        if mode == "gpu":
            steps = prove_gpu(driver, rest[0])
        else:
            steps = prove_pair(driver, rest[0], rest[1], int(rest[2]))
        for step in steps:
            _say(step)
    except CudaError as error:
        _say({"error": str(error)})
    return 0


def _say(step: Step) -> None:
    sys.stdout.write(json.dumps(step) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
