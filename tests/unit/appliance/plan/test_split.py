"""How a model is dealt out to ranks, and what forbids it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.checkpoint.read import summarize
from appliance.checkpoint.summary import CheckpointSummary, Cut
from appliance.plan.split import Split, obstacles, possible_splits

Tiny = Callable[..., CheckpointSummary]
VECTORS = Path(__file__).parents[5] / "shared" / "vectors"


@pytest.mark.parametrize(
    ("depth", "count", "ends"),
    [(1, 5, [5]), (2, 6, [3, 6]), (2, 7, [4, 7]), (3, 8, [3, 6, 8]), (3, 7, [2, 5, 7])],
)
def test_layers_are_dealt_out_as_vllm_does(depth: int, count: int, ends: list[int]) -> None:
    split = Split(1, depth)

    assert [split.layers(stage, count).stop for stage in range(depth)] == ends


@pytest.mark.parametrize(
    ("cut", "width", "part"),
    [
        (Cut.WHOLE, 2, 48),
        (Cut.ROWS, 2, 24),
        (Cut.COLUMNS, 4, 12),
        (Cut.KV_HEADS, 2, 24),
        (Cut.KV_HEADS, 4, 24),
    ],
)
def test_share_of_a_rank_follows_the_cut(cut: Cut, width: int, part: int) -> None:
    assert Split(width).share(cut, 48, kv_heads=2) == part


def test_tensor_neighbours_share_a_stage() -> None:
    split = Split(2, 2)

    assert [split.stage(rank) for rank in range(split.ranks)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("changes", "width", "codes"),
    [
        ({}, 2, []),
        (
            {"num_attention_heads": 9, "num_key_value_heads": 9, "head_dim": 16},
            2,
            ["TP_INVALID"] * 2 + ["E_TP_GROUP"],
        ),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, ["TP_INVALID"]),
        ({"intermediate_size": 112}, 2, ["E_TP_GROUP"]),
        ({"num_key_value_heads": 1}, 2, []),
        ({}, 3, ["TP_INVALID"] * 3 + ["E_TP_GROUP"]),
    ],
    ids=str,
)
def test_obstacles_name_what_does_not_divide(
    tiny: Tiny, changes: dict[str, object], width: int, codes: list[str]
) -> None:
    found = obstacles(tiny(**changes), Split(width))

    assert [each.code for each in found] == codes


def test_more_stages_than_layers_are_refused(tiny: Tiny) -> None:
    assert [each.code for each in obstacles(tiny(), Split(1, 4))] == ["PP_INVALID"]


def test_possible_splits_are_those_without_obstacles(tiny: Tiny) -> None:
    found = possible_splits(tiny(intermediate_size=112), 4)

    assert found == [Split(1, 1), Split(1, 2), Split(1, 3)]


def test_handed_checkpoint_that_two_ranks_would_cut_in_a_group_is_refused() -> None:
    if not VECTORS.exists():
        pytest.skip("no shared folder")
    summary = summarize(VECTORS / "ckpt" / "bad_tp2_group_split")

    (obstacle,) = obstacles(summary, Split(2))

    assert (obstacle.code, obstacle.value) == ("E_TP_GROUP", "112 / 2 = 56")
    assert obstacles(summary, Split(1)) == []


def test_fused_projection_of_quasar_may_be_cut_in_two(
    public: Callable[[str], CheckpointSummary],
) -> None:
    assert obstacles(public("quasar-27b"), Split(2)) == []
