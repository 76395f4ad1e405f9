"""The gated delta rule, its convolution and its norm in the reference library."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "vsim"))

from attention_problem import HostMemory
from gdn_neighbours import Convolution, gated_norm
from gdn_problem import UNTOUCHED, Batch, Shape, error_of, place, random_shape, run, split
from sm70_gdn_cases import GDN_CASES
from sm70_rig import Rig

from appliance.nvfp4 import gdn

if TYPE_CHECKING:
    from appliance.nvfp4.library import Library


@pytest.fixture
def rig(reference: Library) -> Rig:
    return Rig(reference, HostMemory())


def assert_nearest(found: np.ndarray, right: np.ndarray, dtype: type) -> None:
    """Half a unit of the last place, and the FP64 sums' own order."""
    unit = np.spacing(np.abs(right).astype(dtype)).astype(np.float64)
    slack = 1e-11 * max(np.abs(right).max(initial=0), 1e-3)
    wrong = np.abs(found.astype(np.float64) - right) > 0.5000001 * unit + slack
    assert not wrong.any(), (found[wrong][:4], right[wrong][:4], wrong.mean())


@pytest.mark.parametrize("name", sorted(GDN_CASES))
def test_cases_of_the_gpu_library_hold(name: str, rig: Rig) -> None:
    GDN_CASES[name](rig)


@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(np.float16, np.float32), (np.float32, np.float16)]
)
@pytest.mark.parametrize(("k_dim", "v_dim"), [(8, 24), (64, 64), (128, 64), (64, 128)])
def test_delta_of_random_batches_is_the_nearest_value(
    k_dim: int, v_dim: int, dtype: type, *, state_dtype: type, rng: np.random.Generator, rig: Rig
) -> None:
    base = Shape((1,), k_dim=k_dim, v_dim=v_dim, dtype=dtype, state_dtype=state_dtype)
    for _ in range(4):
        batch = Batch(rng, random_shape(rng, longest=60, base=base))
        right, states = batch.right()

        found, found_states = run(rig, batch)

        assert_nearest(found, right, dtype)
        for sequence, state in states.items():
            assert_nearest(found_states[sequence], state, state_dtype)
        rig.release()


def test_delta_over_2000_tokens_is_the_nearest_value(rng: np.random.Generator, rig: Rig) -> None:
    batch = Batch(rng, Shape((1, 2000), 1, "sz", k_heads=1, ratio=3, k_dim=128, v_dim=128))
    right, states = batch.right()

    found, found_states = run(rig, batch)

    assert_nearest(found, right, np.float16)
    assert_nearest(found_states[1], states[1], np.float32)


def test_delta_of_long_random_batches_is_the_nearest_value(
    rng: np.random.Generator, rig: Rig
) -> None:
    for _ in range(3):
        batch = Batch(rng, random_shape(rng, longest=2000))
        right, states = batch.right()

        found, found_states = run(rig, batch)

        assert_nearest(found, right, np.float16)
        for sequence, state in states.items():
            assert_nearest(found_states[sequence], state, np.float32)
        rig.release()


@pytest.mark.parametrize("cut", [1, 2, 63, 64, 65, 99])
def test_delta_of_a_split_sequence_gives_the_same_state(
    cut: int, rng: np.random.Generator, rig: Rig
) -> None:
    whole = Batch(rng, Shape((100,), 0, "s"))
    out, states = run(rig, whole)
    first, last = split(whole, cut)

    head, middle = run(rig, first)
    last.state[last.slots.ids[0], : -last.gap] = middle[0].reshape(-1)
    tail, end = run(rig, last)

    assert error_of(np.concatenate([head, tail]), out) < 2e-3  # units of FP16
    assert error_of(end[0], states[0]) < 1e-6


def test_delta_with_extreme_gates_stays_finite(rng: np.random.Generator, rig: Rig) -> None:
    batch = Batch(rng, Shape((40,), gate_dtype=np.float32))
    batch.ba[0:40:4, :-2] = 1e4
    batch.ba[1:40:4, :-2] = -1e4
    right, states = batch.right()

    found, found_states = run(rig, batch)

    assert_nearest(found, right, np.float16)
    assert_nearest(found_states[0], states[0], np.float32)


def test_workspace_does_not_depend_on_pointers(rng: np.random.Generator, rig: Rig) -> None:
    placed = place(rig, Batch(rng, Shape((3, 4))))
    bare = gdn.Delta.from_buffer_copy(placed.call)
    for name in ("q", "k", "v", "a", "b", "a_log", "dt_bias", "state", "out", "slots"):
        setattr(bare, name, None)

    assert gdn.workspace_bytes(rig.library, bare) == placed.workspace_bytes


@pytest.mark.parametrize("is_time_inner", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(np.float16, np.float16), (np.float32, np.float16)]
)
def test_convolution_of_random_batches_is_the_nearest_value(
    width: int, dtype: type, *, state_dtype: type, is_time_inner: bool, rng: Any, rig: Rig
) -> None:
    base = Shape((1,), dtype=dtype, state_dtype=state_dtype)
    for silu in (False, True):
        shape = random_shape(rng, longest=40, base=base)
        problem = Convolution(
            rng, shape, width=width, is_time_inner=is_time_inner, silu=silu, bias=silu
        )
        right, state = problem.right()

        found, found_state = problem.run(rig)

        assert_nearest(found, right, dtype)
        kept = np.isnan(state) == np.isnan(found_state)
        assert kept.all()
        assert_nearest(np.nan_to_num(found_state), np.nan_to_num(state), state_dtype)
        rig.release()


@pytest.mark.parametrize("gate", list(gdn.Gate))
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_gated_norm_is_the_nearest_value(
    gate: gdn.Gate, dtype: type, *, rng: np.random.Generator, rig: Rig
) -> None:
    for sizes in ((3, 2, 128), (1, 5, 64), (2, 1, 8)):
        found, right = gated_norm(rig, rng, sizes, gate=gate, dtype=dtype)

        assert_nearest(found, right, dtype)


def test_padding_slots_leave_every_row_untouched(rng: np.random.Generator, rig: Rig) -> None:
    batch = Batch(rng, Shape((1, 1, 5), 2, "ppp"))

    found, states = run(rig, batch)

    assert (found == UNTOUCHED).all()
    assert states == {}
