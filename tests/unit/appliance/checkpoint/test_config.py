"""What config.json and tokenizer_config.json say of lengths and heads, or cannot say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from appliance.checkpoint.read import summarize
from appliance.errors import ApplianceError

if TYPE_CHECKING:
    Tiny = Any


def codes_of(root: Path) -> set[str]:
    with pytest.raises(ApplianceError) as caught:
        summarize(root)
    return {fault.code for fault in caught.value.faults}


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        (None, 128),
        ({"rope_type": "llama3", "factor": 8.0}, 128),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "linear", "factor": 2.0}, 256),
    ],
    ids=str,
)
def test_context_limit_counts_rope_scaling_in(
    tiny_of: Callable[[dict[str, object]], Tiny], rope: object, limit: int
) -> None:
    made = tiny_of({"rope_scaling": rope})

    assert summarize(made.write()).geometry.max_position == limit


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 1e-9},
        {"rope_type": "linear", "factor": True},
        {"rope_type": "linear", "factor": float("nan")},
        *[
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
            for original in (-64, 0, 64.5, True, 10**30)
        ],
    ],
    ids=str,
)
def test_rope_scaling_that_leaves_no_context_is_refused(
    tiny_of: Callable[[dict[str, object]], Tiny], rope: object
) -> None:
    assert codes_of(tiny_of({"rope_scaling": rope}).write()) == {"E_CONFIG"}


@pytest.mark.parametrize("longest", [True, 0, -5, 0.5, float("nan"), float("inf"), 10**400])
def test_length_of_a_tokenizer_that_says_nothing_is_not_taken(tiny: Tiny, longest: object) -> None:
    root = tiny.write()
    (root / "tokenizer_config.json").write_text(json.dumps({"model_max_length": longest}))

    assert summarize(root).geometry.max_position == 128


def test_context_limit_is_at_most_the_tokenizers(tiny: Tiny) -> None:
    root = tiny.write()
    (root / "tokenizer_config.json").write_text('{"model_max_length": 77}')

    assert summarize(root).geometry.max_position == 77
