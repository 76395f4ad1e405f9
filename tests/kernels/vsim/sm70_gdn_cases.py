"""Checks of the gated delta rule and its neighbours on device memory, as sm70_cases.py.

Batches are small: the model executes every instruction. Long ones run on a GPU (tests/gpu).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from gdn_neighbours import Convolution, gated_norm
from gdn_problem import Batch, Shape, error_of, place, random_shape, run, split

from appliance.nvfp4 import abi, gdn

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm70_rig import Rig

STEP_BOUND = 5e-4
"""One rounding of the result, or of an FP16 state, to FP16; all else is FP32."""

STATE_STEP_BOUND = 1e-5
"""An FP32 state, token by token."""

CHUNK_BOUND = 6e-3
"""In chunks: the state, the updates and two 64 x 64 matrices are rounded to FP16 as operands.

4.2e-3 is the worst of half a million values; their root mean square is 4e-4.
"""

SAME_KEY_BOUND = 2e-2
"""The worst case of chunks: one key for all tokens and no decay, so updates cancel each other."""


def _is_right(rig: Rig, batch: Batch, *, bound: float, state_bound: float) -> None:
    s = batch.shape
    right, states = batch.right()
    placed = place(rig, batch)
    placed.run()
    found, found_states = placed.result()
    assert np.isfinite(found).all(), f"{s}: not finite"
    for sequence, rows in batch.used():
        error = error_of(found[rows], right[rows])
        assert error <= bound, f"{s}: sequence {sequence}, error {error:.2e}"
        if sequence in states:
            error = error_of(found_states[sequence], states[sequence])
            assert error <= state_bound, f"{s}: state {sequence}, error {error:.2e}"
    rig.release()


def _two_runs_are_equal(rig: Rig, batch: Batch) -> None:
    first, first_states = run(rig, batch)
    second, second_states = run(rig, batch)
    assert first.tobytes() == second.tobytes(), "out of two runs"
    for sequence, state in first_states.items():
        assert state.tobytes() == second_states[sequence].tobytes(), "states of two runs"
    rig.release()


def delta_of_decode_is_right(rig: Rig) -> None:
    """Ratios 1 to 4, both head sizes, both types of state, padding, new sequences."""
    rng = np.random.default_rng(21)
    for ratio, k_dim, v_dim in ((1, 128, 128), (2, 64, 64), (3, 128, 64), (4, 64, 128)):
        shape = Shape((1, 1, 0, 1, 1), 5, "szspp", k_heads=1, ratio=ratio, k_dim=k_dim, v_dim=v_dim)
        batch = Batch(rng, shape)
        _is_right(rig, batch, bound=STEP_BOUND, state_bound=STATE_STEP_BOUND)
        half = Batch(rng, replace(shape, state_dtype=np.float16))
        _is_right(rig, half, bound=STEP_BOUND, state_bound=STEP_BOUND)
    _two_runs_are_equal(rig, Batch(rng, Shape((1, 1), 2, k_dim=128, v_dim=128)))


def delta_of_short_sequences_is_right(rig: Rig) -> None:
    """Up to 16 tokens: token by token, with and without a decode sequence in front."""
    rng = np.random.default_rng(22)
    for lens, decode in (((16, 2, 7), 0), ((1, 3, 16), 1)):
        batch = Batch(rng, Shape(lens, decode, "szs", k_dim=128, gate_dtype=np.float32))
        _is_right(rig, batch, bound=STEP_BOUND, state_bound=STATE_STEP_BOUND)


def delta_of_chunks_is_right(rig: Rig) -> None:
    """Whole chunks and parts of them, behind decode sequences, with gaps between slots."""
    rng = np.random.default_rng(23)
    for shape in (
        Shape((64,), 0, "s", k_heads=1, ratio=1),
        Shape((1, 65, 17, 128, 3), 1, "szspz", k_heads=1, ratio=3),
        Shape((1, 200), 1, "zs", k_heads=1, ratio=2, k_dim=128, v_dim=128),
        Shape((130,), 0, "s", k_heads=2, ratio=1, k_dim=128, v_dim=64, gate_dtype=np.float32),
        Shape((90, 40), 0, "zz", k_heads=1, ratio=4, k_dim=64, v_dim=128, state_dtype=np.float16),
    ):
        _is_right(rig, Batch(rng, shape), bound=CHUNK_BOUND, state_bound=CHUNK_BOUND)


def delta_of_random_batches_is_right(rig: Rig) -> None:
    rng = np.random.default_rng(24)
    for _ in range(4):
        shape = random_shape(rng, longest=150, base=Shape((1,), k_dim=64, v_dim=64))
        _is_right(rig, Batch(rng, shape), bound=CHUNK_BOUND, state_bound=CHUNK_BOUND)


def delta_of_2000_tokens_is_right(rig: Rig) -> None:
    """Ordinary decays, and ones so slow that the state keeps everything."""
    for decay in ((-6.0, 2.0), (-9.0, -5.0)):
        rng = np.random.default_rng(32)
        shape = Shape((1, 2000), 1, "ss", k_heads=1, k_dim=128, v_dim=128, decay=decay)
        _is_right(rig, Batch(rng, shape), bound=CHUNK_BOUND, state_bound=CHUNK_BOUND)


def delta_of_extreme_gates_is_right(rig: Rig) -> None:
    """Decays of nothing and of everything in one chunk, betas of 0 and 1."""
    rng = np.random.default_rng(25)
    batch = Batch(rng, Shape((100,), 0, "s", k_heads=1, gate_dtype=np.float32))
    batch.ba[0:100:7, :-2] = 1e4
    batch.ba[1:100:7, :-2] = -1e4
    _is_right(rig, batch, bound=CHUNK_BOUND, state_bound=CHUNK_BOUND)
    same = Batch(rng, Shape((100,), 0, "z", k_heads=1, decay=(-9.0, -6.0)))
    same.qkv[1:100, : 2 * 64] = same.qkv[0, : 2 * 64]  # one key all over, hardly any decay
    _is_right(rig, same, bound=SAME_KEY_BOUND, state_bound=SAME_KEY_BOUND)


def chunks_have_the_same_bits_twice(rig: Rig) -> None:
    rng = np.random.default_rng(26)
    _two_runs_are_equal(rig, Batch(rng, Shape((1, 100, 70), 1, k_heads=1)))


def chunks_equal_steps(rig: Rig) -> None:
    """The same tokens in chunks and one by one."""
    batch = Batch(np.random.default_rng(30), Shape((150,), 0, "s", k_heads=1, k_dim=128))
    out, states = run(rig, batch)
    placed = place(rig, batch)
    placed.call.max_query_len = 1
    placed.run()
    step_out, step_states = placed.result()
    assert error_of(out, step_out) <= CHUNK_BOUND
    assert error_of(states[0], step_states[0]) <= CHUNK_BOUND
    rig.release()


def parts_of_a_sequence_give_its_state(rig: Rig) -> None:
    """A sequence cut in two calls, in the middle of a chunk, between two, and after one token."""
    whole = Batch(np.random.default_rng(31), Shape((150,), 0, "s", k_heads=1))
    out, states = run(rig, whole)
    for cut in (1, 50, 64, 128):
        first, last = split(whole, cut)
        head, middle = run(rig, first)
        last.state[last.slots.ids[0], : -last.gap] = middle[0].reshape(-1)
        tail, end = run(rig, last)
        assert error_of(np.concatenate([head, tail]), out) <= CHUNK_BOUND, f"cut at {cut}"
        assert error_of(end[0], states[0]) <= CHUNK_BOUND, f"state, cut at {cut}"
        rig.release()


def pieces_of_the_workspace_change_nothing(rig: Rig) -> None:
    """So many sequences, all but one empty, that the chunks of that one fall into two pieces."""
    rng = np.random.default_rng(29)
    alone = Batch(rng, Shape((129,), 0, "s", k_heads=1, ratio=1))
    # Bytes of a chunk: its inverse and scores, four rows of factors, its keys and queries.
    chunk = 4 * 64 * 64 + 4 * 64 * 4 + 2 * 64 * 64 * 2
    before = abi.WORKSPACE_LIMIT_BYTES // chunk - 1
    many = Batch(rng, replace(alone.shape, lens=(0,) * before + (129,) + (0,) * 9))
    many.qkv, many.ba = alone.qkv, alone.ba
    many.a_log, many.dt_bias = alone.a_log, alone.dt_bias
    many.state[many.slots.ids[before]] = alone.state[alone.slots.ids[0]]

    right, right_states = run(rig, alone)
    placed = place(rig, many)
    placed.run()
    found, found_states = placed.result()

    assert placed.workspace_bytes <= abi.WORKSPACE_LIMIT_BYTES
    assert found.tobytes() == right.tobytes()
    assert found_states[before].tobytes() == right_states[0].tobytes()
    rig.release()


def convolutions_are_right(rig: Rig) -> None:
    """Every width, both orders of the state, both types, lengths below and above a tile."""
    rng = np.random.default_rng(27)
    for index, width in enumerate((2, 3, 4, 4, 4)):
        shape = Shape(
            (1, 0, 1, 1, 2, 40, 17, 3),
            4,
            "szspszsp",
            state_dtype=np.float32 if index == 3 else np.float16,
        )
        problem = Convolution(
            rng,
            shape,
            width=width,
            channels=264,
            weight_dtype=np.float32 if index % 2 else np.float16,
            is_time_inner=index % 2 == 0,
            silu=index != 1,
            bias=index > 1,
        )
        right, state = problem.right()
        found, found_state = problem.run(rig)
        assert error_of(found, right) <= STEP_BOUND, f"width {width}"
        assert (np.isnan(found_state) == np.isnan(state)).all(), "state not as it was"
        assert np.array_equal(np.nan_to_num(found_state), np.nan_to_num(state)), "state"
        rig.release()


def gated_norms_are_right(rig: Rig) -> None:
    rng = np.random.default_rng(28)
    for sizes, gate, dtype in (
        ((3, 5, 128), gdn.Gate.SILU, np.float16),
        ((2, 3, 64), gdn.Gate.SIGMOID, np.float16),
        ((1, 1, 512), gdn.Gate.SILU, np.float32),
        ((2, 1, 72), gdn.Gate.SIGMOID, np.float32),
    ):
        found, right = gated_norm(rig, rng, sizes, gate=gate, dtype=dtype)
        assert error_of(found, right) <= STEP_BOUND, sizes
        rig.release()


GDN_CASES: dict[str, Callable[[Rig], None]] = {
    check.__name__: check
    for check in (
        delta_of_decode_is_right,
        delta_of_short_sequences_is_right,
        delta_of_chunks_is_right,
        delta_of_random_batches_is_right,
        delta_of_2000_tokens_is_right,
        delta_of_extreme_gates_is_right,
        chunks_have_the_same_bits_twice,
        chunks_equal_steps,
        parts_of_a_sequence_give_its_state,
        pieces_of_the_workspace_change_nothing,
        convolutions_are_right,
        gated_norms_are_right,
    )
}
