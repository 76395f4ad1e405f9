"""Attention and the cache write of the reference library."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "vsim"))

from attention_problem import (
    Batch,
    HostMemory,
    Shape,
    attend,
    random_shape,
)
from sm70_attention_cases import ATTENTION_CASES
from sm70_rig import Rig

from appliance.nvfp4 import attention as binding
from appliance.nvfp4.abi import Status

if TYPE_CHECKING:
    from appliance.nvfp4.library import Library


@pytest.fixture
def rig(reference: Library) -> Rig:
    return Rig(reference, HostMemory())


@pytest.mark.parametrize("name", sorted(ATTENTION_CASES))
def test_cases_of_the_gpu_library_hold(name: str, rig: Rig) -> None:
    ATTENTION_CASES[name](rig)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 256, 512])
def test_attend_of_random_batches_is_the_nearest_value(
    head_dim: int, dtype: type, *, rng: np.random.Generator, rig: Rig
) -> None:
    base = Shape((1,), (1,), head_dim=head_dim, dtype=dtype)
    for _ in range(3):
        batch = Batch(rng, random_shape(rng, longest=400, base=base))
        right = batch.right()

        found = attend(rig, batch)

        # Half a unit of the last place, and the FP64 sums' own order.
        unit = np.spacing(np.abs(right).astype(dtype)).astype(np.float64)
        assert (np.abs(found.astype(np.float64) - right) <= 0.5000001 * unit).all()
        rig.release()


def test_attend_over_33000_keys_is_the_nearest_value(rng: np.random.Generator, rig: Rig) -> None:
    batch = Batch(rng, Shape((1, 2), (33000, 777), head_dim=64, block_size=528))
    right = batch.right()

    found = attend(rig, batch)

    unit = np.spacing(np.abs(right).astype(np.float16)).astype(np.float64)
    assert (np.abs(found.astype(np.float64) - right) <= 0.5000001 * unit).all()


def test_attend_gives_nan_where_a_visible_key_is_nan(rng: np.random.Generator, rig: Rig) -> None:
    batch = Batch(rng, Shape((3,), (20,)))
    k, _ = batch.views()
    k[batch.block_table[0, 1], 2, 1] = np.nan  # key 18 of KV head 1: query 1 is the first to see it

    found = attend(rig, batch)

    assert np.isfinite(found[0]).all()
    assert np.isfinite(found[1:, :2]).all()
    assert np.isnan(found[1:, 2:]).all()


ODD = "odd"  # the address plus one byte
ATTENTION_WRONG: tuple[tuple[str, object, Status], ...] = (
    ("struct_size", 8, Status.EVERSION),
    ("reserved", 1, Status.EVERSION),
    ("io_type", 3, Status.ETYPE),
    ("tokens", 0, Status.ESHAPE),
    ("sequences", 0, Status.ESHAPE),
    ("sequences", 65536, Status.ESHAPE),
    ("decode_sequences", 3, Status.ESHAPE),
    ("decode_sequences", -1, Status.ESHAPE),
    ("decode_query_len", 0, Status.ESHAPE),
    ("max_seq_len", 0, Status.ESHAPE),
    ("q_heads", 5, Status.ESHAPE),
    ("kv_heads", 0, Status.ESHAPE),
    ("head_dim", 60, Status.ESHAPE),
    ("head_dim", 520, Status.ESHAPE),
    ("window", -1, Status.ESHAPE),
    ("scale", float("nan"), Status.ESHAPE),
    ("scale", 0.0, Status.ESHAPE),
    ("query", None, Status.ENULL),
    ("query", ODD, Status.EALIGN),
    ("query_stride", 8, Status.ESTRIDE),
    ("query_stride", 257, Status.EALIGN),
    ("query_start", None, Status.ENULL),
    ("seq_lens", ODD, Status.EALIGN),
    ("block_table", None, Status.ENULL),
    ("block_table_stride", 0, Status.ESTRIDE),
    ("k_cache", None, Status.ENULL),
    ("v_cache", ODD, Status.EALIGN),
    ("block_size", 24, Status.ESHAPE),
    ("cache_block_stride", 8, Status.ESTRIDE),
    ("cache_token_stride", 65, Status.EALIGN),
    ("cache_head_stride", 8, Status.ESTRIDE),
    ("out", None, Status.ENULL),
    ("out_stride", 8, Status.ESTRIDE),
)
ROWS_WRONG: tuple[tuple[str, object, Status], ...] = (
    ("struct_size", 8, Status.EVERSION),
    ("io_type", 3, Status.ETYPE),
    ("tokens", 0, Status.ESHAPE),
    ("kv_heads", 0, Status.ESHAPE),
    ("head_dim", 4, Status.ESHAPE),
    ("k", None, Status.ENULL),
    ("k", ODD, Status.EALIGN),
    ("k_stride", 8, Status.ESTRIDE),
    ("v", None, Status.ENULL),
    ("v_stride", 129, Status.EALIGN),
    ("slots", None, Status.ENULL),
    ("k_cache", None, Status.ENULL),
    ("v_cache", None, Status.ENULL),
    ("blocks", 0, Status.ESHAPE),
    ("block_size", 0, Status.ESHAPE),
    ("cache_token_stride", 8, Status.ESTRIDE),
)


class Scene:
    """A right call of both functions over memory that the test owns."""

    def __init__(self) -> None:
        memory = HostMemory()
        self._memory = memory
        self.out = memory.allocate(1 << 16)
        memory.write(self.out, np.full(1 << 16, 0x5A, np.uint8))
        self.inputs = memory.allocate(1 << 16)
        memory.write(self.inputs, np.zeros(1 << 16, np.uint8))
        self.workspace = memory.allocate(1 << 20)
        cache = {"block_size": 16, "cache_block_stride": 2048, "cache_token_stride": 128}
        cache["cache_head_stride"] = 64
        self.attention = binding.Attention(
            io_type=1, tokens=2, sequences=2, decode_sequences=2, decode_query_len=1, max_seq_len=9,
            q_heads=4, kv_heads=2, head_dim=64, scale=0.125, query=self.inputs, query_stride=256,
            query_start=self.inputs, seq_lens=self.inputs, block_table=self.inputs,
            block_table_stride=1, k_cache=self.inputs, v_cache=self.inputs, out=self.out,
            out_stride=256, **cache,
        )  # fmt: skip
        self.rows = binding.CacheRows(
            io_type=1, tokens=2, kv_heads=2, head_dim=64, k=self.inputs, k_stride=128,
            v=self.inputs, v_stride=128, slots=self.inputs, k_cache=self.out,
            v_cache=self.out + 8192, blocks=2, **cache,
        )  # fmt: skip

    def written(self) -> bytes:
        return self._memory.read(self.out, 1 << 16)


def _spoiled(call: Any, field: str, value: Any) -> Any:
    setattr(call, field, getattr(call, field) + 1 if value == ODD else value)
    return call


def _assert_refused(library: Library, name: str, status: Status, *arguments: object) -> None:
    found = Status(int(getattr(library._dll, name)(*arguments)))
    sentence = library._dll.nvfp4_last_error().decode()
    assert found is status, sentence
    assert sentence.endswith(".")


def test_right_calls_are_taken(reference: Library) -> None:
    scene = Scene()

    needed = binding.workspace_bytes(reference, scene.attention)
    binding.attend(reference, scene.attention, workspace=scene.workspace, workspace_bytes=needed)
    binding.write_kv(reference, scene.rows)


@pytest.mark.parametrize(("field", "value", "status"), ATTENTION_WRONG)
def test_attend_refuses_a_wrong_call_and_writes_nothing(
    field: str, value: Any, status: Status, *, reference: Library
) -> None:
    scene = Scene()
    before = scene.written()
    call = _spoiled(scene.attention, field, value)

    _assert_refused(
        reference, "nvfp4_attend", status, ctypes.addressof(call), scene.workspace, 1 << 20, None
    )

    assert scene.written() == before


@pytest.mark.parametrize(("field", "value", "status"), ROWS_WRONG)
def test_write_kv_refuses_a_wrong_call_and_writes_nothing(
    field: str, value: Any, status: Status, *, reference: Library
) -> None:
    scene = Scene()
    before = scene.written()
    call = _spoiled(scene.rows, field, value)

    _assert_refused(reference, "nvfp4_write_kv", status, ctypes.addressof(call), None)

    assert scene.written() == before


def test_attend_refuses_a_wrong_workspace(reference: Library) -> None:
    scene = Scene()
    call, needed = scene.attention, binding.workspace_bytes(reference, scene.attention)
    at = ctypes.addressof(call)

    for workspace, size, status in (
        (scene.workspace, needed - 1, Status.EWORKSPACE),
        (scene.workspace + 16, needed, Status.EALIGN),
        (None, needed, Status.ENULL),
    ):
        _assert_refused(reference, "nvfp4_attend", status, at, workspace, size, None)
    _assert_refused(reference, "nvfp4_attend", Status.ENULL, None, scene.workspace, needed, None)
    _assert_refused(reference, "nvfp4_attend_workspace_bytes", Status.ENULL, at, None)


def test_workspace_does_not_depend_on_pointers(reference: Library) -> None:
    call = Scene().attention
    sizes = _without_pointers(call)

    assert binding.workspace_bytes(reference, sizes) == binding.workspace_bytes(reference, call)


def _without_pointers(call: binding.Attention) -> binding.Attention:
    copy = binding.Attention.from_buffer_copy(call)
    for name, kind in copy._fields_:
        if kind is ctypes.c_void_p:
            setattr(copy, name, None)
    return copy
