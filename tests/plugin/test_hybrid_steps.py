"""What the engine says of a step, as the gated delta networks read it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).parent / "engine" / "steps.py"


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    results = tmp_path_factory.mktemp("steps") / "results.json"
    subprocess.run((sys.executable, SCRIPT, results), check=True, capture_output=True)
    found: dict[str, dict[str, Any]] = json.loads(results.read_text())
    return found


def test_mixed_step_has_its_decodes_first_and_says_which_sequences_are_new(steps) -> None:
    found = steps["mixed"]

    assert (found["decodes"], found["longest"]) == (2, 30)
    assert found["slots"] == [5, 6, 7]
    assert found["carried"] == [True, False, False]
    assert found["query_start"] == [0, 1, 2, 32]


def test_padded_step_points_to_the_null_block_behind_its_sequences(steps) -> None:
    found = steps["padded"]

    assert found["decodes"] == 4
    assert found["slots"] == [5, 6, 0, 0]
    assert found["query_start"] == [0, 1, 2, 2, 2]


def test_steps_lie_at_one_address_so_that_a_capture_reads_the_next(steps) -> None:
    assert steps["captured"]["addresses"] == steps["replayed"]["addresses"]
    assert steps["replayed"]["slots"] == [3, 4]
    assert steps["replayed"]["carried"] == [True, False]


def test_states_at_block_ends_are_those_of_the_block_that_a_step_writes(steps) -> None:
    assert steps["aligned"]["slots"] == [12, 21, 31]
