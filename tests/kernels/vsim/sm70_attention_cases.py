"""Checks of attention and of the cache write against FP64, each a function of a rig.

They run on the modelled V100 (the Volta code itself), on a newer GPU (the PTX), and on the
reference library.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from attention_problem import Batch, Shape, attend, random_shape
from sm70_cases import assert_close

from appliance.nvfp4 import abi
from appliance.nvfp4 import attention as binding

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm70_rig import Rig

HEAD_DIMS = (64, 128, 256)


def _check(rig: Rig, shape: Shape, seed: int = 0) -> np.ndarray:
    batch = Batch(np.random.default_rng(seed), shape)
    found = attend(rig, batch)
    assert_close(found, batch.right(), str(shape))
    rig.release()
    return found


def decode_is_right_for_every_ratio(rig: Rig) -> None:
    """1 to 16 query heads for a KV head; a length around each border of a step and of a block."""
    for ratio in range(1, 17):
        for head_dim in HEAD_DIMS[ratio % 3 :: 3]:
            lengths = (1, 15 + ratio, 31, 32 + ratio)
            _check(
                rig,
                Shape(
                    (1,) * 4,
                    lengths,
                    q_heads=2 * ratio,
                    kv_heads=2,
                    head_dim=head_dim,
                    decode_sequences=4,
                ),
            )


def decode_of_long_sequences_is_right(rig: Rig) -> None:
    """Keys split over CTAs, whose results are combined; unequal lengths in one launch."""
    for head_dim in HEAD_DIMS:
        _check(
            rig,
            Shape(
                (1, 1, 1),
                (2000, 130, 1),
                q_heads=6,
                kv_heads=1,
                head_dim=head_dim,
                block_size=48,
                decode_sequences=3,
            ),
        )


def decode_with_a_bound_far_above_the_lengths_is_right(rig: Rig) -> None:
    """As in a captured graph: the split is chosen for max_seq_len, most CTAs have no keys."""
    _check(rig, Shape((1, 1), (70, 33), decode_sequences=2, head_dim=128, max_seq_len=40000))


def drafted_tokens_see_one_key_more_each(rig: Rig) -> None:
    """Several queries of a decode sequence, up to 64 rows of a KV head and beyond."""
    for head_dim, q_heads, drafted in ((64, 8, 4), (128, 16, 4), (256, 8, 3), (64, 16, 5)):
        _check(
            rig,
            Shape(
                (drafted, 1, drafted - 1),
                (77, 300, drafted - 1),
                q_heads=q_heads,
                kv_heads=1,
                head_dim=head_dim,
                decode_sequences=3,
                decode_query_len=drafted,
            ),
        )


def prompts_are_right(rig: Rig) -> None:
    """Whole prompts of several sequences, one of them shorter than a tile."""
    for head_dim in HEAD_DIMS:
        _check(rig, Shape((150, 1, 33), (150, 1, 33), q_heads=4, kv_heads=2, head_dim=head_dim))


def chunks_behind_a_prefix_are_right(rig: Rig) -> None:
    for head_dim, ratio in ((64, 7), (128, 5), (256, 6)):
        _check(
            rig,
            Shape((40, 7), (300, 64), q_heads=ratio, kv_heads=1, head_dim=head_dim, block_size=32),
        )


def short_chunks_of_long_sequences_are_right(rig: Rig) -> None:
    """Few tiles of queries over many keys: the keys are split, and the splits combined."""
    for head_dim in HEAD_DIMS:
        for window in (0, 1300):
            _check(
                rig,
                Shape(
                    (20, 1, 3, 1),
                    (1700, 0, 700, 1),
                    q_heads=8,
                    kv_heads=1,
                    head_dim=head_dim,
                    window=window,
                ),
            )


def mixed_batches_are_right(rig: Rig) -> None:
    """Decode sequences in front, chunks behind; the same batch with all of it as chunks."""
    shape = Shape(
        (1, 1, 20, 65), (90, 17, 400, 65), q_heads=8, kv_heads=2, head_dim=128, layout="hnd"
    )
    for decode in (0, 1, 2):
        _check(rig, replace(shape, decode_sequences=decode))


def windows_hide_old_keys(rig: Rig) -> None:
    """Blocks that the window has left behind are gone from the table, their slots NaN."""
    for head_dim, window in ((64, 1), (128, 40), (256, 100)):
        for decode in (0, 1):
            _check(
                rig,
                Shape(
                    (1, 50, 120),
                    (260, 200, 120),
                    head_dim=head_dim,
                    window=window,
                    decode_sequences=decode,
                ),
            )


def large_scores_do_not_overflow(rig: Rig) -> None:
    """A softmax of one key: scores up to several hundreds, whose weights meet FP16."""
    for head_dim in HEAD_DIMS:
        for decode in (0, 2):
            _check(
                rig,
                Shape(
                    (1, 3),
                    (200, 90),
                    head_dim=head_dim,
                    spread=40.0,
                    decode_sequences=decode,
                    decode_query_len=3,
                ),
            )


def empty_sequences_write_zeros_or_nothing(rig: Rig) -> None:
    """Padding of a captured graph: a query without keys gives zeros, no query writes nothing."""
    for decode in (0, 4):
        shape = Shape((1, 0, 1, 0), (40, 0, 0, 0), head_dim=64, decode_sequences=decode)
        found = _check(rig, shape)
        assert not found[1].any()


def random_batches_are_right(rig: Rig) -> None:
    rng = np.random.default_rng(33)
    for i in range(9):
        base = Shape((1,), (1,), head_dim=HEAD_DIMS[i % 3])
        _check(rig, random_shape(rng, longest=300, base=base), seed=i)


def attention_gives_the_same_bits(rig: Rig) -> None:
    shape = Shape((1, 40), (700, 130), head_dim=128, decode_sequences=1)
    first, second = (attend(rig, Batch(np.random.default_rng(3), shape)) for _ in range(2))
    assert np.array_equal(first.view(np.uint16), second.view(np.uint16))


def rows_are_written_to_their_slots(rig: Rig) -> None:
    """NHD, HND and separate caches; slots of -1 and beyond the cache are skipped."""
    rng = np.random.default_rng(4)
    tokens, kv_heads, head_dim, blocks, size = 5, 3, 64, 4, 16
    slots = np.array([17, -1, 0, blocks * size, 63], np.int64)
    rows = rng.standard_normal((2, tokens, kv_heads, head_dim)).astype(np.float16)
    for layout in ("nhd", "hnd", "split"):
        dims = (kv_heads, size) if layout == "hnd" else (size, kv_heads)
        width = head_dim if layout == "split" else 2 * head_dim
        caches = 2 if layout == "split" else 1
        right = np.full((caches, blocks, *dims, width), 9, np.float16)
        cache = rig.put(right)
        view = right.swapaxes(2, 3) if layout == "hnd" else right
        k = view[0][..., :head_dim]
        v = view[1] if layout == "split" else view[0][..., head_dim:]
        block, token, head = (each // 2 for each in k.strides[:3])
        binding.write_kv(
            rig.library,
            binding.CacheRows(
                io_type=abi.Type.F16,
                tokens=tokens,
                kv_heads=kv_heads,
                head_dim=head_dim,
                k=rig.put(rows[0]),
                k_stride=kv_heads * head_dim,
                v=rig.put(rows[1]),
                v_stride=kv_heads * head_dim,
                slots=rig.put(slots),
                k_cache=cache,
                v_cache=cache + v.ctypes.data - right.ctypes.data,
                blocks=blocks,
                block_size=size,
                cache_block_stride=block,
                cache_token_stride=token,
                cache_head_stride=head,
            ),
        )
        for row, slot in enumerate(slots):
            if 0 <= slot < blocks * size:
                k[slot // size, slot % size] = rows[0, row]
                v[slot // size, slot % size] = rows[1, row]
        assert np.array_equal(rig.get(cache, right.shape, np.float16), right), layout


ATTENTION_CASES: dict[str, Callable[[Rig], None]] = {
    check.__name__: check
    for check in (
        decode_is_right_for_every_ratio,
        decode_of_long_sequences_is_right,
        decode_with_a_bound_far_above_the_lengths_is_right,
        drafted_tokens_see_one_key_more_each,
        prompts_are_right,
        chunks_behind_a_prefix_are_right,
        short_chunks_of_long_sequences_are_right,
        mixed_batches_are_right,
        windows_hide_old_keys,
        large_scores_do_not_overflow,
        empty_sequences_write_zeros_or_nothing,
        random_batches_are_right,
        attention_gives_the_same_bits,
        rows_are_written_to_their_slots,
    )
}
