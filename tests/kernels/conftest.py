"""Handed vectors as parameters, and the reference library at the level of numpy arrays."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from appliance.nvfp4 import abi, host
from appliance.nvfp4.library import Library, reference_library

if TYPE_CHECKING:
    from collections.abc import Callable

VECTORS = Path(__file__).parents[3] / "shared" / "vectors"
NO_VECTORS = pytest.mark.skipif(not VECTORS.is_dir(), reason="no shared folder")

_DTYPES = {
    "U8": np.uint8,
    "F8_E4M3": np.uint8,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I32": np.uint32,
}
# packed, scales, global, and whether the global divides
_CONVENTIONS = (
    (".weight_packed", ".weight_scale", ".weight_global_scale", True),
    (".weight", ".weight_scale", ".weight_scale_2", False),
    (".qweight", ".weight_scales", ".weight_scale_2", False),
    ("", "_weight_scale", "_weight_scale_2", False),
)
# Refused on purpose, or not NVFP4; each has its own test.
_OTHER_CASES = {"bad_scale_negative", "bad_scale_nan", "zero_tensor_modelopt", "mxfp4_modelopt"}


@dataclass(frozen=True)
class Linear:
    """One matrix in canonical form, with its exact FP32 values or their hash if they are known."""

    codes: np.ndarray
    scales: np.ndarray
    row_globals: np.ndarray
    is_divisor: bool
    expected: np.ndarray | None = None
    sha256: str = ""

    @property
    def k(self) -> int:
        return self.codes.shape[1] * 2

    @property
    def group(self) -> int:
        return self.k // self.scales.shape[1]

    def assert_is(self, values: np.ndarray) -> None:
        """Compare bit for bit; columns that are padding are left out."""
        if self.expected is None:
            assert hashlib.sha256(values.tobytes()).hexdigest() == self.sha256
            return
        kept = np.ascontiguousarray(values[:, : self.expected.shape[1]])
        np.testing.assert_array_equal(kept.view(np.uint32), self.expected.view(np.uint32))


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        flat = np.frombuffer(content[begin:end], _DTYPES[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


def linears_of(tensors: dict[str, np.ndarray]) -> dict[str, Linear]:
    """Every NVFP4 matrix of a file by module name; experts of a stack are `module[e]`."""
    found = {}
    for name, packed in tensors.items():
        for codes, scales, global_, is_divisor in _CONVENTIONS:
            module = name.removesuffix(codes) if name.endswith(codes) else None
            if module is None or module + scales not in tensors:
                continue
            if packed.dtype not in (np.uint8, np.uint32) or packed.ndim < 2:
                continue
            if tensors[module + scales].ndim == packed.ndim:
                found.update(_canonical(tensors, module, (name, scales, global_), is_divisor))
            break
    return found


def _canonical(
    tensors: dict[str, np.ndarray], module: str, names: tuple[str, str, str], is_divisor: bool
) -> dict[str, Linear]:
    codes = np.ascontiguousarray(tensors[names[0]]).view(np.uint8)
    scales = tensors[module + names[1]]
    value = tensors.get(module + names[2], np.ones((), np.float32)).reshape(-1)
    if codes.ndim == 3:
        return {
            f"{module}[{e}]": _linear(codes[e], scales[e], value[e], is_divisor)
            for e in range(codes.shape[0])
        }
    return {module: _linear(codes, scales, value[0], is_divisor)}


def _linear(codes: np.ndarray, scales: np.ndarray, value: Any, is_divisor: bool) -> Linear:
    rows = np.full(codes.shape[0], value, np.float32)
    return Linear(codes.copy(), scales.copy(), rows, is_divisor)


def _case_linears(name: str) -> dict[str, Linear]:
    expected = np.load(VECTORS / f"{name}.npz")
    found = {}
    for module, linear in linears_of(read_safetensors(VECTORS / f"{name}.safetensors")).items():
        stack, _, expert = module.partition("[")
        if stack in expected.files:
            values = expected[stack][int(expert[:-1])] if expert else expected[stack]
            found[f"{name}/{module}"] = _with(linear, expected=values)
    return found


def _checkpoint_linears(checkpoint: dict[str, Any]) -> dict[str, Linear]:
    tensors: dict[str, np.ndarray] = {}
    for path in sorted((VECTORS / checkpoint["dir"]).glob("*.safetensors")):
        tensors |= read_safetensors(path)
    hashes = {module: entry[1] for module, entry in checkpoint["dequant_fp32_sha256"].items()}
    return {
        f"{checkpoint['name']}/{module}": _with(linear, sha256=hashes[module])
        for module, linear in linears_of(tensors).items()
        if module in hashes
    }


def _with(linear: Linear, **fields: Any) -> Linear:
    return Linear(linear.codes, linear.scales, linear.row_globals, linear.is_divisor, **fields)


def all_linears() -> dict[str, Linear]:
    """Every matrix that a correct decoder gives bit for bit."""
    manifest = json.loads((VECTORS / "MANIFEST.json").read_text())
    found: dict[str, Linear] = {}
    for case in manifest["cases"]:
        if case["name"] not in _OTHER_CASES and f"{case['name']}.safetensors" in case["files"]:
            found |= _case_linears(case["name"])
    for checkpoint in manifest["checkpoints"]:
        if checkpoint.get("dequant_fp32_sha256"):
            found |= _checkpoint_linears(checkpoint)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `linear` every handed matrix."""
    if "linear" not in metafunc.fixturenames:
        return
    if not VECTORS.is_dir():
        metafunc.parametrize("linear", [pytest.param(None, marks=NO_VECTORS)])
        return
    found = all_linears()
    metafunc.parametrize("linear", found.values(), ids=found.keys())


@dataclass(frozen=True)
class Packed:
    """A packed weight and the memory that it lies in."""

    handle: abi.Weight
    buffer: np.ndarray


class Host:
    """The reference library on numpy arrays."""

    def __init__(self, library: Library) -> None:
        self.library = library

    @staticmethod
    def aligned(nbytes: int, fill: int = 0) -> np.ndarray:
        """uint8 [nbytes] at an address that buffers, plans and workspaces need."""
        raw = np.full(nbytes + abi.BUFFER_ALIGNMENT, fill, np.uint8)
        start = -raw.ctypes.data % abi.BUFFER_ALIGNMENT
        return raw[start : start + nbytes]

    def create(self, desc: abi.WeightDesc) -> Packed:
        buffer = self.aligned(self.library.weight_bytes(desc), fill=0xA5)
        handle = self.library.weight_create(desc, buffer.ctypes.data, buffer.nbytes)
        return Packed(handle, buffer)

    def pack(self, *experts: Linear, kind: abi.WeightKind = abi.WeightKind.LINEAR) -> Packed:
        """Pack one matrix, or one for each expert; raise what the report says."""
        first = experts[0]
        source = host.describe(
            first.codes, first.scales, first.row_globals, is_divisor=first.is_divisor
        )
        packed = self.create(
            abi.WeightDesc(
                kind=kind,
                experts=len(experts),
                n=source.n,
                k=source.k,
                group=source.group,
                scale_type=source.scale_type,
                global_kind=source.global_kind,
            )
        )
        report = abi.Report()
        address = self.address(report)
        self.library.report_reset(address)
        for index, linear in enumerate(experts):
            self.put(packed, linear, expert=index, report=address)
        self.library.report_status(report, packed.handle)
        return packed

    def put(
        self, packed: Packed, linear: Linear, *, report: int, expert: int = 0, row_begin: int = 0
    ) -> None:
        source = host.describe(
            linear.codes, linear.scales, linear.row_globals, is_divisor=linear.is_divisor
        )
        self.library.repack(
            packed.handle, source, expert=expert, row_begin=row_begin, report=report
        )

    @staticmethod
    def address(struct_: Any) -> int:
        return int(np.frombuffer(struct_, np.uint8).ctypes.data)

    def dequantize(
        self,
        packed: Packed,
        *,
        dtype: type = np.float32,
        flags: abi.Dequantize = abi.Dequantize.NONE,
        expert: int = 0,
        row_begin: int = 0,
        rows: int | None = None,
    ) -> np.ndarray:
        count = packed.handle.n - row_begin if rows is None else rows
        out = np.empty((count, packed.handle.k), dtype)
        self.library.dequantize(
            packed.handle,
            out.ctypes.data,
            out_type=self.type_of(out),
            out_stride=out.shape[1],
            expert=expert,
            row_begin=row_begin,
            rows=count,
            flags=flags,
        )
        return out

    def matmul(self, packed: Packed, x: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        y = np.full((x.shape[0], packed.handle.n), np.nan, x.dtype)
        workspace = self.aligned(self.library.matmul_workspace_bytes(packed.handle, x.shape[0]))
        self.library.matmul(
            packed.handle,
            x.shape[0],
            io_type=self.type_of(x),
            x=x.ctypes.data,
            x_stride=x.strides[0] // x.itemsize,
            y=y.ctypes.data,
            y_stride=y.shape[1],
            bias=0 if bias is None else bias.ctypes.data,
            workspace=workspace.ctypes.data,
            workspace_bytes=workspace.nbytes,
        )
        return y

    @staticmethod
    def type_of(array: np.ndarray) -> abi.Type:
        return abi.Type.F16 if array.dtype == np.float16 else abi.Type.F32


@pytest.fixture(scope="session")
def reference() -> Library:
    """libnvfp4_ref.so; its absence is a failure, `make native` builds it."""
    return reference_library()


@pytest.fixture(scope="session")
def on_host(reference: Library) -> Host:
    return Host(reference)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the test's name only."""
    digest = hashlib.sha256(request.node.nodeid.encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


@pytest.fixture(scope="session")
def vectors() -> Path:
    """The folder of the handed vectors."""
    if not VECTORS.is_dir():
        pytest.skip("no shared folder")
    return VECTORS


@pytest.fixture(scope="session")
def every_linear(vectors: Path) -> dict[str, Linear]:
    """What `linear` is given, by case and module."""
    assert vectors.is_dir()
    return all_linears()


@pytest.fixture(scope="session")
def linears_in(vectors: Path) -> Callable[[str], dict[str, Linear]]:
    """The NVFP4 matrices of a handed file by module name, without their expected values."""
    return lambda name: linears_of(read_safetensors(vectors / f"{name}.safetensors"))


@pytest.fixture(scope="session")
def tensors_in(vectors: Path) -> Callable[[str], dict[str, np.ndarray]]:
    """The tensors of a handed file, 8-bit floats as uint8."""
    return lambda name: read_safetensors(vectors / f"{name}.safetensors")


def make_linear(
    rng: np.random.Generator,
    n: int,
    k: int,
    *,
    group: int = 16,
    scale_dtype: type = np.uint8,
    is_divisor: bool = False,
) -> Linear:
    """A random matrix with the spread of real checkpoints; every row has its own global."""
    codes = rng.integers(0, 256, (n, k // 2), np.uint8)
    if scale_dtype is np.uint8:
        scales = rng.integers(0, 0x7F, (n, k // group), np.uint8)
    else:
        scales = rng.uniform(0, 2, (n, k // group)).astype(scale_dtype)
    row_globals = np.exp2(rng.uniform(-12, -6, n)).astype(np.float32)
    return Linear(codes, scales, 1 / row_globals if is_divisor else row_globals, is_divisor)


@pytest.fixture(scope="session")
def linear_type() -> type[Linear]:
    return Linear


@pytest.fixture(scope="session")
def linear_factory() -> Any:
    return make_linear
