"""The chooser of the sm_70 library: pure host code, over the shapes of real models."""

from __future__ import annotations

import ctypes
import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "vsim"))

from sm70_build import built_library, has_compiler

from appliance.nvfp4 import abi
from appliance.nvfp4.library import Library, LibraryError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_compiler(), reason="no nvcc 11.8"),
]

# (hidden, intermediate, heads, KV heads, head dim) of dense models of 0.5 to 72 billion weights.
MODELS = (
    *((896, 4864, 14, 2, 64), (1024, 3072, 16, 8, 128), (1536, 8960, 12, 2, 128)),
    *((2048, 6144, 16, 8, 128), (2048, 8192, 32, 8, 64), (2048, 11008, 16, 2, 128)),
    *((2560, 9728, 32, 8, 128), (3072, 8192, 24, 8, 128), (3584, 18944, 28, 4, 128)),
    *((4096, 11008, 32, 32, 128), (4096, 12288, 32, 8, 128), (4096, 14336, 32, 8, 128)),
    *((3584, 14336, 16, 8, 256), (5120, 13824, 40, 8, 128), (5120, 17408, 40, 8, 128)),
    *((5120, 25600, 64, 8, 128), (5120, 27648, 40, 8, 128), (6656, 17920, 52, 52, 128)),
    *((8192, 28672, 64, 8, 128), (8192, 29568, 64, 8, 128)),
)
BATCHES = (1, 2, 8, 9, 16, 17, 32, 33, 64, 100, 256, 1024, 1025, 4096)


def shapes() -> list[tuple[int, int]]:
    """(N, K) of every linear layer of the models at one and two ranks."""
    found = set()
    for (hidden, inner, heads, kv_heads, dim), ranks in itertools.product(MODELS, (1, 2)):
        found |= {
            ((heads + 2 * kv_heads) * dim // ranks, hidden),
            (hidden, heads * dim // ranks),
            (2 * inner // ranks, hidden),
            (hidden, inner // ranks),
        }
    return sorted(found)


@pytest.fixture(scope="module")
def library(repository: Path) -> Library:
    return Library(built_library(repository, "nvfp4_sm70"))


def choose(
    library: Library, m: int, n: int, k: int, *, experts: int = 1, top_k: int = 1
) -> abi.Choice:
    return library.choose(
        abi.Problem(
            kind=abi.WeightKind.LINEAR,
            m=m,
            n=n,
            k=k,
            experts=experts,
            top_k=top_k,
            group=16,
            scale_type=abi.Type.E4M3,
        )
    )


def test_models_are_twenty() -> None:
    assert len(set(MODELS)) == 20


@pytest.mark.parametrize("m", BATCHES)
def test_choice_fits_the_device_and_the_workspace_limit(m: int, library: Library) -> None:
    for n, k in shapes():
        choice = choose(library, m, n, k)
        where = f"{m}x{n}x{k}"

        assert choice.kernel == (
            abi.Kernel.SKINNY
            if m <= 32
            else abi.Kernel.TENSOR
            if m <= 1024
            else abi.Kernel.DEQUANTIZE
        ), where
        assert 0 <= choice.workspace_bytes <= abi.WORKSPACE_LIMIT_BYTES, where
        assert choice.tile_m >= min(m, 8), where
        assert choice.split_k <= max(1, k // 64), where
        if m <= 32:
            assert choice.tile_m >= m, where
            assert 1 <= choice.ctas <= 160, where


@pytest.mark.parametrize("m", [1, 8, 16, 32])
def test_skinny_choice_uses_most_of_the_device(m: int, library: Library) -> None:
    """A layer with enough steps for it is spread over at least 60 of the 80 multiprocessors."""
    for n, k in shapes():
        if (n // 32) * (k // 64) >= 160 * 16:
            assert choose(library, m, n, k).ctas >= 60, f"{m}x{n}x{k}"


def test_slice_is_whole_rows_within_the_limit(library: Library) -> None:
    for n, k in shapes():
        choice = choose(library, 4096, n, k)
        assert 0 < choice.slice_rows <= n
        assert choice.slice_rows * k * 2 <= abi.WORKSPACE_LIMIT_BYTES
        assert choice.slice_rows == n or choice.slice_rows % 64 == 0


def test_rows_too_long_for_a_slice_stay_with_the_library(library: Library) -> None:
    for n, k in ((4096, 2**20), (64, 2**31 - 64), (2**10, 786432 + 64)):
        choice = choose(library, 4096, n, k)
        assert choice.kernel == abi.Kernel.TENSOR, f"{n}x{k}"
        assert choice.slice_rows == 0
        assert choice.workspace_bytes <= abi.WORKSPACE_LIMIT_BYTES
    assert choose(library, 4096, 2**10, 786432).slice_rows == 64


def test_largest_grouped_product_has_its_true_workspace(library: Library) -> None:
    """Numbers near 2^63 stay what they are, or are refused."""
    n = 2**31 - 1
    for m, top_k in ((2**30 - 1, 1), (2**24 - 1, 64)):
        choice = choose(library, m, n, 128, experts=2, top_k=top_k)
        assert choice.workspace_bytes == m * top_k * n * 4

    for m, top_k in ((2**30, 1), (2**24, 64), (2**31 - 1, 1), (2**63 - 1, 2)):
        with pytest.raises(LibraryError, match="NVFP4_ESHAPE"):
            choose(library, m, n, 128, experts=2, top_k=top_k)


def test_workspace_query_covers_every_smaller_batch(library: Library) -> None:
    """The handle is made by hand: its buffer is never touched by a query."""
    for n, k in shapes()[::7]:
        for m_max in (1, 7, 20, 48, 300):
            most = max(choose(library, m, n, k).workspace_bytes for m in range(1, m_max + 1))
            assert workspace(library, n, k, m_max) >= most, f"{m_max}x{n}x{k}"


def workspace(library: Library, n: int, k: int, m_max: int) -> int:
    weight = abi.Weight(
        magic=0x34504656,
        layout=2,
        layout_version=1,
        kind=1,
        group=16,
        scale_type=3,
        global_kind=1,
        experts=1,
        n=n,
        k=k,
    )
    raw = bytes(weight)[: abi.Weight.checksum.offset]
    value = 0xCBF29CE484222325
    for byte in raw:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    weight.checksum = ctypes.c_uint64(value).value
    return library.matmul_workspace_bytes(weight, m_max)
