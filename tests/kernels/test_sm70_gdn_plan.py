"""What the sm_70 library asks for to run the gated delta rule: pure host code, no device."""

from __future__ import annotations

import ctypes
import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "vsim"))

from sm70_build import built_library, has_compiler

from appliance.nvfp4 import abi, gdn
from appliance.nvfp4.abi import Status
from appliance.nvfp4.error import LibraryError
from appliance.nvfp4.library import Library

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_compiler(), reason="no nvcc 11.8"),
]

ADDRESS = 1 << 20  # aligned, never read: every call here is refused before


@pytest.fixture(scope="module")
def library(repository: Path) -> Library:
    return Library(built_library(repository, "nvfp4_sm70"))


def call_of(**sizes: float) -> gdn.Delta:
    """A right call of these sizes over memory that does not exist."""
    fields = {"k_heads": 8, "v_heads": 24, "k_dim": 128, "v_dim": 128, "tokens": 2048}
    fields |= {"sequences": 1, "max_query_len": 2048, "slot_count": 4, "io_type": 1}
    fields |= {"gate_type": 1, "a_log_type": 2, "dt_bias_type": 1, "state_type": 2, "scale": 0.1}
    call = gdn.Delta(**(fields | sizes))
    for name, kind in call._fields_:
        if kind is ctypes.c_void_p:
            setattr(call, name, ADDRESS)
    keys, values = call.k_heads * call.k_dim, call.v_heads * call.v_dim
    strides = {"q": keys, "k": keys, "v": values, "out": values, "a": call.v_heads}
    strides |= {"b": call.v_heads, "state_slot": values * call.k_dim}
    for name, stride in strides.items():
        setattr(call, f"{name}_stride", stride)
    return call


def test_workspace_stays_below_the_limit_and_never_falls_with_a_size(library: Library) -> None:
    for heads, dim in itertools.product(((1, 1), (8, 24), (16, 48), (64, 256)), (64, 128)):
        before = 0
        for tokens, sequences in ((17, 1), (2048, 1), (2048, 40), (8192, 40), (1 << 20, 65535)):
            call = call_of(
                tokens=tokens, sequences=sequences, k_heads=heads[0], v_heads=heads[1], k_dim=dim,
                max_query_len=tokens,
            )  # fmt: skip

            found = gdn.workspace_bytes(library, call)

            assert before <= found <= abi.WORKSPACE_LIMIT_BYTES
            assert found % abi.BUFFER_ALIGNMENT == 0
            before = found


@pytest.mark.parametrize(
    "sizes", [{"decode_sequences": 1, "tokens": 1}, {"max_query_len": 16}], ids=["decode", "short"]
)
def test_token_by_token_needs_no_workspace(sizes: dict[str, int], library: Library) -> None:
    assert gdn.workspace_bytes(library, call_of(**sizes)) == 0


def test_workspace_of_2048_tokens_of_a_rank_of_a_27b_is_22_mb(library: Library) -> None:
    """24 value and 8 key heads of 128: 33 slots of 680 kB."""
    assert gdn.workspace_bytes(library, call_of()) == 33 * (24 * 17408 + 8 * 32768)


@pytest.mark.parametrize(
    ("field", "value"),
    [("k_dim", 256), ("v_dim", 32), ("k_dim", 72), ("io_type", 2), ("v_stride", 1 << 25),
     ("out_stride", 1 << 25)],
)  # fmt: skip
def test_what_no_kernel_takes_is_refused_with_a_sentence(
    field: str, value: int, *, library: Library
) -> None:
    call = call_of()
    setattr(call, field, value)
    if field == "k_dim":
        call.q_stride = call.k_stride = call.k_heads * value
        call.state_slot_stride = call.v_heads * call.v_dim * value

    with pytest.raises(LibraryError) as caught:
        gdn.gated_delta(library, call, workspace=ADDRESS, workspace_bytes=1 << 30)

    assert Status.EUNSUPPORTED.name in str(caught.value.faults[0])
