"""Real layers of the engine, loaded through the plugin without a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).parent / "engine" / "layers.py"
PLAIN = {"weight": "Parameter"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of one process that imports the engine."""
    out = tmp_path_factory.mktemp("layers") / "results.json"
    done = subprocess.run(
        (sys.executable, str(SCRIPT), str(out)),
        env=os.environ | {"VLLM_NO_USAGE_STATS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def test_plugin_module_imports_nothing_heavy(results: dict[str, Any]) -> None:
    assert results["register"]["imported_early"] == []


def test_register_twice_registers_once(results: dict[str, Any]) -> None:
    found = results["register"]

    assert (found["methods"], found["loaders"], found["class"]) == (1, 1, "Nvfp4Config")
    assert (found["capability"], found["files"]) == (70, [])


def test_register_under_another_series_ends_with_the_version(results: dict[str, Any]) -> None:
    message = results["register"]["refused"]

    assert message.startswith("error[ENGINE_VERSION] vllm: ")
    assert "got 0.10.1.1+cpu;" in message


def test_fused_parts_keep_their_own_globals(results: dict[str, Any]) -> None:
    found = results["separate_globals"]

    assert found["rows"] == [0.25, 0.25, 2.0, 2.0, 2.0]
    assert found["left"] == PLAIN


def test_global_of_a_matrix_fused_on_disk_belongs_to_every_part(results: dict[str, Any]) -> None:
    assert results["fused_on_disk"]["rows"] == [0.25] * 5


def test_tensor_of_several_parts_fills_them_all(results: dict[str, Any]) -> None:
    assert results["several_parts"]["rows"] == [0.25] * 5 + [3.0] * 3


def test_fp8_parts_are_decoded_with_scales_of_their_own(results: dict[str, Any]) -> None:
    found = results["fp8_parts"]

    assert found["rows"] == [0.25] * 5 + [0.5, 1.0, 2.0]
    assert found["left"] == PLAIN


def test_padded_columns_are_cut_off(results: dict[str, Any]) -> None:
    found = results["padded_columns"]

    assert found["shape"] == [3, 40]
    assert found["product"] == [[20.0, 20.0, 20.0]]


def test_part_that_came_twice_is_refused(results: dict[str, Any]) -> None:
    message = results["part_twice"]

    assert message.startswith("error[E_DUPLICATE_TENSOR] gate_proj.weight: each tensor once, got 2")


def test_dense_weight_beyond_fp16_is_refused(results: dict[str, Any]) -> None:
    assert results["too_large_for_fp16"].startswith("error[E_FP16_RANGE] proj.weight: ")


def test_ranks_that_cut_a_block_are_refused_with_those_that_do_not(results: dict[str, Any]) -> None:
    message = results["cut_block"]

    assert message.startswith("error[E_TP_GROUP] down_proj: ")
    assert "got 232 columns a rank; use one of [1, 2, 4, 29," in message
