"""What every hot call promises: same bits, no allocation, graphs, refusals that write nothing."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kernels_compare import same_bits
from kernels_device import Device, Packed
from kernels_moe import make_layer, random_ids

from appliance.nvfp4 import abi
from appliance.nvfp4.error import LibraryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels_report import Report

HOT_M = (1, 8, 12, 24, 40, 100, 300)


@dataclass
class HotCall:
    """One call on memory of its own, to be repeated, captured and replayed."""

    name: str
    run: Callable[[], None]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    scratch: list[torch.Tensor]

    def poison(self, fill: int = 0xFF) -> None:
        for tensor in (*self.outputs, *self.scratch):
            tensor.view(torch.uint8).fill_(fill)

    def results(self) -> list[torch.Tensor]:
        return [output.clone() for output in self.outputs]

    def assert_gives(self, wanted: list[torch.Tensor], what: str) -> None:
        for index, (output, right) in enumerate(zip(self.outputs, wanted, strict=True)):
            assert same_bits(output, right), f"{what}: output {index} has other bits"


def hot_calls(device: Device, *, quick: bool) -> list[HotCall]:
    """Dense products at every kernel, a whole MoE layer, and a norm."""
    calls = []
    for n, k in ((33, 576),) if quick else ((33, 5120), (5120, 1536), (8240, 576)):
        packed = device.pack(device.matrix(n, k, seed=21))
        calls += [_dense_call(device, packed, m) for m in (HOT_M[:4] if quick else HOT_M)]
    sizes = ((6, 48, 80),) if quick else ((6, 48, 1040), (32, 384, 512))
    for experts, width, hidden in sizes:
        calls += [_moe_call(device, experts, width, hidden, m) for m in (2, 24, 100)]
    return [*calls, _norm_call(device)]


def _dense_call(device: Device, packed: Packed, m: int) -> HotCall:
    n, k = packed.handle.n, packed.handle.k
    x, workspace = device.tokens(m, k), device.workspace(packed, m)
    y = torch.empty(m, n, dtype=torch.float16, device=device.name)
    return HotCall(
        f"matmul M={m} N={n} K={k}",
        lambda: device.matmul_into(packed, x, y, workspace),
        [x],
        [y],
        [workspace],
    )


def _moe_call(device: Device, experts: int, width: int, hidden: int, m: int) -> HotCall:
    layer, top_k = make_layer(device, experts, width, hidden), 2
    gate_up = device.pack(*layer.gate_up, kind=abi.WeightKind.GATE_UP)
    down = device.pack(*layer.down)
    routing = device.route(random_ids(device, m, top_k, experts - 1), experts)
    x, weights = device.tokens(m, hidden), torch.rand(m, top_k, device=device.name)
    middle = torch.empty(m * top_k, width, dtype=torch.float16, device=device.name)
    y = torch.empty(m, hidden, dtype=torch.float16, device=device.name)
    workspace = device.room(
        device.library.moe_workspace_bytes(gate_up.handle, down.handle, m, top_k)
    )

    def run() -> None:
        device.plan_into(routing)
        device.gate_up_into(gate_up, routing, x, middle, workspace)
        device.down_into(down, routing, middle, y, workspace, weights=weights)

    return HotCall(
        f"MoE layer {experts}x{width}x{hidden} M={m}", run, [x], [middle, y], [workspace]
    )


def _norm_call(device: Device) -> HotCall:
    x = device.tokens(7, 1536)
    gain = torch.rand(1536, device=device.name)
    y = torch.empty_like(x)
    norm = abi.Norm(io_type=abi.Type.F16, weight_type=abi.Type.F32, eps=1e-6, rows=7, hidden=1536)
    norm.weight, norm.x, norm.y = gain.data_ptr(), x.data_ptr(), y.data_ptr()  # type: ignore[attr-defined]
    norm.x_stride = norm.y_stride = 1536  # type: ignore[attr-defined]
    return HotCall(
        "rms_norm",
        lambda: device.library.rms_norm(norm, stream=device.stream()),
        [x, gain],
        [y],
        [],
    )


def run_same_bits(device: Device, report: Report, *, quick: bool) -> None:
    """The same inputs give the same bits, whatever was in the output and the workspace."""
    for call in hot_calls(device, quick=quick):
        with report.case(call.name):
            call.poison()
            call.run()
            first = call.results()
            for fill in (0x00, 0x3C, 0xFF, 0x7B):
                call.poison(fill)
                call.run()
                call.assert_gives(first, f"over memory of {fill:#x}")


def run_graphs(device: Device, report: Report, *, quick: bool) -> None:
    """A captured call replays to the bits of an eager one, also on new inputs."""
    for call in hot_calls(device, quick=quick):
        with report.case(call.name):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                call.run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call.run()
            for turn in range(3):
                for tensor in call.inputs:
                    tensor.copy_(torch.randn_like(tensor, dtype=torch.float32) / (turn + 1))
                call.poison()
                call.run()
                eager = call.results()
                call.poison()
                graph.replay()
                call.assert_gives(eager, f"replay {turn}")
    report.details["replays"] = 3


def run_no_allocation(device: Device, report: Report, *, quick: bool) -> None:
    """Free device memory is the same before and after many hot calls."""
    calls = hot_calls(device, quick=quick)
    for call in calls:
        call.run()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(20):
        for call in calls:
            call.run()
    torch.cuda.synchronize()
    with report.case("free memory"):
        after = torch.cuda.mem_get_info()[0]
        assert before == after, f"{before - after} bytes fewer are free after hot calls"
    report.details.update(calls=20 * len(calls), free_before=before, free_after=after)


def run_self_test(device: Device, report: Report, *, quick: bool) -> None:
    """The library's own test: once cold, once warm; the warm one within its 3 seconds."""
    with report.case("self-test"):
        begin = time.monotonic()
        device.library.self_test(0)
        cold = time.monotonic() - begin
        result = device.library.self_test(0)
        assert result.checksum == result.expected, f"{result.checksum:#x} {result.expected:#x}"
        assert result.bad_problem == -1
        report.details.update(
            cold_s=round(cold, 3),
            warm_s=round(result.elapsed_s, 3),
            problems=result.problems,
            checksum=f"{result.checksum:#x}",
        )
        # The sanitizing and the emulating device are slower; 3 s are promised for the real one.
        assert result.elapsed_s < (30 if quick or device.is_cuda else 3), result.elapsed_s


@dataclass(frozen=True)
class Scene:
    """A right product to be spoilt; `y` is all that a call may write."""

    packed: Packed
    x: torch.Tensor
    y: torch.Tensor
    workspace: torch.Tensor

    def arguments(self) -> dict[str, Any]:
        return {
            "weight": ctypes.pointer(abi.Weight.from_buffer_copy(self.packed.handle)),
            "io_type": int(abi.Type.F16),
            "m": self.x.shape[0],
            "x": self.x.data_ptr(),
            "x_stride": self.x.stride(0),
            "y": self.y.data_ptr(),
            "y_stride": self.y.stride(0),
            "bias": 0,
            "workspace": self.workspace.data_ptr(),
            "workspace_bytes": self.workspace.numel(),
        }


def _spoilt(scene: Scene) -> dict[str, tuple[dict[str, Any], set[str]]]:
    """Name of the spoilt argument -> changes, and the statuses that are right."""
    right = scene.arguments()
    foreign = abi.Weight.from_buffer_copy(scene.packed.handle)
    foreign.layout = 3 - foreign.layout
    old = abi.Weight.from_buffer_copy(scene.packed.handle)
    old.layout_version += 1
    other = abi.Weight.from_buffer_copy(scene.packed.handle)
    other.group = 32
    bare = abi.Weight()
    return {
        "null weight": ({"weight": None}, {"ENULL"}),
        "foreign handle": ({"weight": ctypes.pointer(foreign)}, {"EHANDLE"}),
        "wrong version": ({"weight": ctypes.pointer(old)}, {"EVERSION", "EHANDLE"}),
        "other group": ({"weight": ctypes.pointer(other)}, {"EGROUP", "EHANDLE"}),
        "empty handle": ({"weight": ctypes.pointer(bare)}, {"EHANDLE", "EVERSION"}),
        "M = 0": ({"m": 0}, {"ESHAPE"}),
        "M < 0": ({"m": -1}, {"ESHAPE"}),
        "null x": ({"x": 0}, {"ENULL"}),
        "misaligned x": ({"x": right["x"] + 2}, {"EALIGN"}),
        "short x rows": ({"x_stride": 8}, {"ESTRIDE"}),
        "x rows not 16-byte": ({"x_stride": right["x_stride"] + 1}, {"EALIGN"}),
        "null y": ({"y": 0}, {"ENULL"}),
        "misaligned y": ({"y": right["y"] + 1}, {"EALIGN"}),
        "short y rows": ({"y_stride": 1}, {"ESTRIDE"}),
        "type of nobody": ({"io_type": 9}, {"ETYPE"}),
        "misaligned bias": ({"bias": right["y"] + 1}, {"EALIGN"}),
        "null workspace": ({"workspace": 0}, {"ENULL", "EWORKSPACE"}),
        "misaligned workspace": ({"workspace": right["workspace"] + 8}, {"EALIGN"}),
        "short workspace": ({"workspace_bytes": 16}, {"EWORKSPACE"}),
    }


def _scene(device: Device) -> Scene:
    """Few columns and many steps, and an M at which that needs a workspace."""
    packed = device.pack(device.matrix(33, 5120, seed=31))
    m = next(m for m in (24, 16, 8, 40) if device.workspace(packed, m).numel() > 16)
    y = torch.full((m, 33), 3.5, dtype=torch.float16, device=device.name)
    return Scene(packed, device.tokens(m, 5120), y, device.workspace(packed, m))


def run_refusals(device: Device, report: Report, *, quick: bool) -> None:
    """Bad calls give a status and a sentence, and leave memory as it was."""
    scene = _scene(device)
    dll = device.library._dll
    for name, (changes, wanted) in _spoilt(scene).items():
        with report.case(f"matmul, {name}"):
            status = abi.Status(dll.nvfp4_matmul(*(scene.arguments() | changes).values(), None))
            sentence = dll.nvfp4_last_error().decode()
            assert status.name in wanted, f"{status.name}: {sentence}"
            assert sentence.endswith("."), f"no sentence: {sentence!r}"
            assert bool((scene.y == 3.5).all()), "a refused call wrote"
    for name, fields, wanted in (
        ("K = 24", {"k": 24}, {"ESHAPE"}),
        ("N = 0", {"n": 0}, {"ESHAPE"}),
        ("K = 0", {"k": 0}, {"ESHAPE"}),
        ("group 48", {"group": 48}, {"EGROUP"}),
        ("group beyond K", {"k": 48, "group": 32}, {"EGROUP"}),
        ("experts 0", {"experts": 0}, {"ESHAPE"}),
    ):
        with report.case(f"weight_bytes, {name}"):
            desc = abi.WeightDesc(
                **{"kind": 1, "experts": 1, "n": 33, "k": 64, "group": 16} | fields,
                scale_type=abi.Type.E4M3,
                global_kind=1,
            )
            _refuses(lambda desc=desc: device.library.weight_bytes(desc), wanted)
    _refuses_bad_data(device, report)
    report.details["quick"] = quick
    with report.case("a right call after all refusals"):
        device.matmul(scene.packed, scene.x)


def _refuses(call: Callable[[], object], wanted: set[str], *words: str) -> None:
    refusal: LibraryError | None = None
    try:
        call()
    except LibraryError as error:
        refusal = error
    assert refusal is not None, "the call was taken"
    name = refusal.status.name if refusal.status else "no status"
    assert name in wanted, str(refusal)
    for word in words:
        assert word in str(refusal), f"no '{word}' in {refusal}"


def _refuses_bad_data(device: Device, report: Report) -> None:
    """NaN and negative scale codes are named with row and block."""
    for code, wanted in ((0x7F, "ESCALE_NAN"), (0xFF, "ESCALE_NAN"), (0x80, "ESCALE_NEGATIVE")):
        with report.case(f"scale code {code:#x}"):
            matrix = device.matrix(40, 160)
            matrix.scales[34, 7] = code
            _refuses(lambda matrix=matrix: device.pack(matrix), {wanted}, "row 34", "block 7")
    for value in (float("nan"), float("inf"), -1.0):
        with report.case(f"global {value}"):
            matrix = device.matrix(40, 160)
            matrix.row_globals[17] = value
            _refuses(lambda matrix=matrix: device.pack(matrix), {"EGLOBAL"}, "row 17")
