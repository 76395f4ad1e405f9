"""Wrong calls of the sm_70 library, in a process of their own; JSON on stdout.

With the modelled V100 as CUDA run time (`model`) every call runs, right ones too, over memory of
the model. Without one (`bare`) no device is there: whatever a wrong call is refused for, no CUDA
call comes first, and a right one is refused by the driver's absence.

Usage: sm70_calls.py LIBRARY model|bare
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.nvfp4 import abi
from appliance.nvfp4.abi import Status
from appliance.nvfp4.library import Library

if TYPE_CHECKING:
    from types import ModuleType

HERE = Path(__file__).parent
HOST_LAYOUT = 1  # nvfp4_layout: a handle of the other library
HOST_ONLY = ("nvfp4_dequantize_source", "nvfp4_set_threads")
# The device's memory is not looked at, so a plan for another batch is not seen; few rows need no
# workspace, so none is missing.
NOT_SEEN = {
    *((name, "m", 2) for name in ("nvfp4_moe_gate_up", "nvfp4_moe_down")),
    *(
        (name, "workspace", value)
        for name in ("nvfp4_matmul", "nvfp4_moe_gate_up")
        for value in (None, "odd")
    ),
    ("nvfp4_repack", "report.magic", 1),
}
WEIGHT_MAGIC, SM70_LAYOUT, LAYOUT_VERSION = 0x34504656, 2, 1


def module_of(name: str, path: Path) -> ModuleType:
    """A test file as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


kernels = module_of("kernels_conftest", HERE.parent / "conftest.py")
calls = module_of("calls_conftest", HERE / "conftest.py")
bad_calls = module_of("bad_calls", HERE / "test_bad_calls.py")


class ModelMemory(kernels.Host):
    """The library over memory of the model, which the process sees as its own."""

    _runtime: Any = None

    @classmethod
    def aligned(cls, nbytes: int, fill: int = 0) -> np.ndarray:
        """uint8 [nbytes] that kernels reach; the model aligns it to 512 bytes."""
        cls._runtime = cls._runtime or ctypes.CDLL("libcudart.so.11.0")
        pointer = ctypes.c_void_p()
        assert cls._runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes)) == 0
        found = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer.value))
        found[:] = fill
        return found

    def pack(self, *experts: Any, kind: abi.WeightKind = abi.WeightKind.LINEAR) -> Any:
        """As the base, with the report in memory that kernels reach."""
        n, k = experts[0].codes.shape[0], experts[0].k
        packed = self.create(
            abi.WeightDesc(
                kind=kind,
                experts=len(experts),
                n=n,
                k=k,
                group=experts[0].group,
                scale_type=abi.Type.E4M3,
                global_kind=abi.GlobalKind.MULTIPLIER,
            )
        )
        report = self.aligned(ctypes.sizeof(abi.Report))
        self.library.report_reset(report.ctypes.data)
        for index, linear in enumerate(experts):
            self.put(packed, linear, report=report.ctypes.data, expert=index)
        self.library.report_status(abi.Report.from_buffer(report), packed.handle)
        return packed

    def linear(self, rng: np.random.Generator, n: int, k: int) -> Any:
        """A random matrix in memory of the model."""
        made = kernels.make_linear(rng, n, k)
        arrays = []
        for array in (made.codes, made.scales, made.row_globals):
            room = self.aligned(array.nbytes).view(array.dtype).reshape(array.shape)
            room[:] = array
            arrays.append(room)
        return kernels.Linear(*arrays, is_divisor=False)


class NoDevice:
    """The library where no call reaches a device: what a scene would enqueue is left out."""

    def __init__(self, library: Library) -> None:
        self._bare = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bare, name)

    def moe_plan(self, *arguments: Any, **named: Any) -> None:
        """Nothing: the plan stays zero."""

    def report_reset(self, *arguments: Any, **named: Any) -> None:
        """Nothing: the report stays zero."""


class BareMemory(kernels.Host):
    """Memory of this process, and handles made by hand: a check looks at nothing else."""

    def __init__(self, library: Library) -> None:
        super().__init__(NoDevice(library))

    def pack(self, *experts: Any, kind: abi.WeightKind = abi.WeightKind.LINEAR) -> Any:
        """A handle whose buffer holds nothing."""
        n, k = experts[0].codes.shape[0], experts[0].k
        buffer = self.aligned(1 << 12)
        handle = abi.Weight(
            magic=WEIGHT_MAGIC,
            layout=SM70_LAYOUT,
            layout_version=LAYOUT_VERSION,
            kind=kind,
            group=16,
            scale_type=abi.Type.E4M3,
            global_kind=abi.GlobalKind.MULTIPLIER,
            experts=len(experts),
            n=n,
            k=k,
            buffer=buffer.ctypes.data,
        )
        checksum = 0xCBF29CE484222325  # FNV-1a
        for byte in bytes(handle)[: abi.Weight.checksum.offset]:
            checksum = (checksum ^ byte) * 0x100000001B3 % 2**64
        handle.checksum = checksum
        return kernels.Packed(handle, buffer)

    def linear(self, rng: np.random.Generator, n: int, k: int) -> Any:
        """A random matrix."""
        return kernels.make_linear(rng, n, k)


def right_status(name: str, arguments: dict[str, Any], mode: str) -> Status:
    """What a right call answers; without a device all that enqueue are refused."""
    if name in HOST_ONLY:
        return Status.EUNSUPPORTED
    if mode == "bare" and ("stream" in arguments or name == "nvfp4_self_test"):
        return Status.EDEVICE
    if mode == "bare" and name == "nvfp4_report_status":
        return Status.EREPORT  # no device has reset it
    return Status.OK


def expected_of(
    name: str, argument: str, value: Any, *, status: Status, mode: str
) -> Status | None:
    """The status of a wrong call here; None = this library does not refuse it."""
    if name in HOST_ONLY:
        return Status.EUNSUPPORTED
    if mode == "bare" and name == "nvfp4_self_test":
        return Status.EDEVICE  # the first thing it looks for
    if (name, argument, value) in NOT_SEEN:
        return None
    return status


def fault_of(scene: Any, name: str, argument: str, value: Any, status: Status) -> str:
    """What is wrong with the answer to one wrong call; "" = nothing."""
    if argument == "weight.layout":
        value = HOST_LAYOUT
    arguments = scene.arguments(name)
    bad_calls._spoil(arguments, argument, value, scene)
    structs = {key: bytes(each) for key, each in arguments.items() if bad_calls._is_struct(each)}
    before = scene.snapshot()
    found = Status(scene.call(name, arguments))
    sentence = scene.last_error()
    if found != status:
        return f"{found.name}: {sentence}"
    if len(sentence) <= 15 or not sentence.endswith("."):
        return f"no sentence: {sentence!r}"
    after = {key: bytes(each) for key, each in arguments.items() if bad_calls._is_struct(each)}
    return "" if scene.snapshot() == before and after == structs else "it wrote something"


def main() -> int:
    library = Library(Path(sys.argv[1]))
    mode = sys.argv[2]
    memory = ModelMemory(library) if mode == "model" else BareMemory(library)
    scene = calls.Scene(memory, memory.linear, abi.Type.F16)
    faults, count = {}, 0
    for name in bad_calls.WRONG:
        arguments, before = scene.arguments(name), scene.snapshot()
        right = Status(scene.call(name, arguments))
        if right != right_status(name, arguments, mode):
            faults[f"{name}: the right call"] = f"{right.name}: {scene.last_error()}"
        elif right != Status.OK and scene.snapshot() != before:
            faults[f"{name}: the right call"] = "refused, and wrote something"
    for name, argument, value, status in bad_calls.CASES:
        expected = expected_of(name, argument, value, status=status, mode=mode)
        if expected is None:
            continue
        fault = fault_of(scene, name, argument, value, expected)
        count += 1
        if fault:
            faults[f"{name} {argument}={value!r}"] = fault
    sys.stdout.write("RESULTS " + json.dumps({"count": count, "faults": faults}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
