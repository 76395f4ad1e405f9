"""How the sm_70 library cuts a batch of attention: pure host code, no device."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "vsim"))

from sm70_build import built_library, has_compiler

from appliance.nvfp4 import attention as binding
from appliance.nvfp4.abi import Status
from appliance.nvfp4.error import LibraryError
from appliance.nvfp4.library import Library

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_compiler(), reason="no nvcc 11.8"),
]

# Of query, caches, out and tables: aligned, never read, since every call here is refused before.
ADDRESS = 1 << 20
MOST_BYTES = 12 << 20


@pytest.fixture(scope="module")
def library(repository: Path) -> Library:
    return Library(built_library(repository, "nvfp4_sm70"))


def call_of(**sizes: float) -> binding.Attention:
    """A right call of these sizes over memory that does not exist."""
    call = binding.Attention(io_type=1, scale=0.1, **sizes)
    width = call.q_heads * call.head_dim
    for name, kind in call._fields_:
        if kind is ctypes.c_void_p:
            setattr(call, name, ADDRESS)
    fields = {"query_stride": width, "out_stride": width, "block_table_stride": 1}
    fields |= {"cache_head_stride": call.head_dim, "cache_token_stride": width}
    for name, value in ({"block_size": 16, "cache_block_stride": 16 * width} | fields).items():
        setattr(call, name, value)
    return call


def needed_by(library: Library, call: binding.Attention) -> int:
    """Bytes that the call itself asks for, from its refusal of a workspace that is too small."""
    with pytest.raises(LibraryError) as refusal:
        binding.attend(library, call, workspace=ADDRESS, workspace_bytes=-1)
    assert refusal.value.status is Status.EWORKSPACE
    return int(re.findall(r"\d+", str(refusal.value).replace("-1", ""))[-1])


def random_sizes(rng: np.random.Generator) -> dict[str, int]:
    kv_heads = int(rng.integers(1, 17))
    sequences = int(np.exp(rng.uniform(0, np.log(600))))
    return {
        "tokens": sequences * 4,
        "sequences": sequences,
        "decode_sequences": int(rng.integers(0, sequences + 1)),
        "decode_query_len": int(rng.integers(1, 5)),
        "max_seq_len": int(np.exp(rng.uniform(0, np.log(200_000)))),
        "kv_heads": kv_heads,
        "q_heads": kv_heads * int(rng.integers(1, 17)),
        "head_dim": int(rng.choice((64, 128, 256))),
    }


def test_workspace_suffices_for_every_smaller_batch(library: Library) -> None:
    rng = np.random.default_rng(8)
    largest = 0
    for _ in range(300):
        sizes = random_sizes(rng)
        bound = binding.workspace_bytes(library, call_of(**sizes))
        largest = max(largest, bound)
        for _ in range(20):
            smaller = dict(sizes)
            for name in ("tokens", "decode_query_len", "max_seq_len"):
                smaller[name] = int(rng.integers(1, sizes[name] + 1))
            others = sizes["sequences"] - sizes["decode_sequences"]
            smaller["decode_sequences"] = int(rng.integers(0, sizes["decode_sequences"] + 1))
            smaller["sequences"] = smaller["decode_sequences"] + int(rng.integers(0, others + 1))
            smaller["sequences"] = max(smaller["sequences"], 1)
            if smaller["sequences"] - smaller["decode_sequences"] > others:
                continue
            assert needed_by(library, call_of(**smaller)) <= bound, (sizes, smaller)

    assert 0 < largest <= MOST_BYTES


def test_short_prompts_need_no_workspace(library: Library) -> None:
    sizes = random_sizes(np.random.default_rng(1)) | {"decode_sequences": 0, "max_seq_len": 500}

    assert binding.workspace_bytes(library, call_of(**sizes)) == 0


def test_short_chunks_of_long_sequences_split_their_keys(library: Library) -> None:
    """40 tokens of 4 heads are 2 tiles for each of 8 KV heads: their keys fill the device."""
    call = call_of(tokens=40, sequences=1, max_seq_len=32768, q_heads=32, kv_heads=8, head_dim=128)
    tiles, splits, rows = 2 * 8, 10, 128

    assert needed_by(library, call) == tiles * splits * rows * (128 + 2) * 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("io_type", 2),
        ("head_dim", 96),
        ("head_dim", 512),
        ("tokens", 2**30),
        ("cache_token_stride", 2**25),
        ("block_size", 2**21),
    ],
)
def test_what_no_kernel_computes_is_refused(field: str, value: int, library: Library) -> None:
    call = call_of(tokens=1, sequences=1, max_seq_len=9, q_heads=4, kv_heads=2, head_dim=64)
    setattr(call, field, value)
    if field in {"head_dim", "io_type"}:
        call.query_stride = call.out_stride = 4096
        call.cache_head_stride = call.cache_token_stride = call.cache_block_stride = 4096

    with pytest.raises(LibraryError) as refusal:
        binding.attend(library, call, workspace=ADDRESS, workspace_bytes=1 << 30)

    assert refusal.value.status is Status.EUNSUPPORTED
