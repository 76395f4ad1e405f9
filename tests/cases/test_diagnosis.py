"""Reported ends of an engine, by the id of the case: what `appliance doctor` makes of the log."""

# ruff: noqa: E501 - log lines are as long as the engine makes them

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.config.load import load_config

ENGINE = "(EngineCore pid=71) ERROR 11-29 19:22:33 [core.py:866] "
NO_CACHE = (
    ENGINE
    + "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
)
OOM = ENGINE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.06 GiB. GPU 0 has"
LOADED = "(Worker pid=80) INFO [gpu_model_runner.py:5406] Model loading took 14.2 GiB memory and 61.0 seconds"
LEFT = "(Worker pid=80) INFO [gpu_worker.py:564] Available KV cache memory: -1.05 GiB"
ASKED = "(Worker pid=80) DEBUG [gpu_worker.py:552] Initial free memory: 15.5 GiB; Requested memory: 0.950000 (util), 14.98 GiB"


def arguments(**values: object) -> str:
    return f"(APIServer pid=12) INFO [api_utils.py:273] non-default args: {values}"


@pytest.fixture
def doctor(appliance: Callable[..., Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Diagnose lines, with the exit status of the engine if it is known."""

    def run(*lines: str, status: int | None = None) -> dict[str, Any]:
        log = tmp_path / "engine.log"
        log.write_text("\n".join(lines))
        words = () if status is None else ("--exit-code", str(status))
        ended = appliance("doctor", "--log", log, "--json", *words)
        assert ended.code == 0
        return json.loads(ended.out)

    return run


def assert_accepted(file: Callable[..., Path], change: dict[str, dict[str, Any]]) -> None:
    load_config(file(**change))


@pytest.mark.parametrize(
    ("lines", "memory", "keys"),
    [
        (
            [arguments(gpu_memory_utilization=0.95, max_num_batched_tokens=8192), LOADED, LEFT],
            "GiB: share of the GPU (utilization 0.95) - 14.2 weights - activations, graphs and others = -1.05 for the KV cache",
            ["enforce_eager", "max_num_batched_tokens", "max_num_seqs"],
        ),
        (
            [
                arguments(gpu_memory_utilization=0.95, enforce_eager=True, max_num_seqs=2),
                LOADED,
                ASKED,
                LEFT,
            ],
            "GiB: 14.98 requested (utilization 0.95) - 14.2 weights - 1.83 activations, graphs and others = -1.05 for the KV cache",
            ["max_num_batched_tokens"],
        ),
        (
            [arguments(gpu_memory_utilization=0.5, enforce_eager=True), LEFT],
            "GiB: share of the GPU (utilization 0.5) - activations, graphs and others = -1.05 for the KV cache",
            ["gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs"],
        ),
    ],
    ids=["at 0.95", "with all numbers", "at 0.5"],
)
def test_rc_013_no_room_for_the_cache_is_added_up_and_a_high_share_is_never_raised(
    doctor: Callable[..., dict[str, Any]],
    file: Callable[..., Path],
    lines: list[str],
    memory: str,
    keys: list[str],
) -> None:
    found = doctor(*lines, NO_CACHE, status=1)

    assert (found["code"], found["memory"]) == ("NO_KV_MEMORY", memory)
    assert [key for change in found["changes"] for part in change.values() for key in part] == keys
    for change in found["changes"]:
        assert_accepted(file, change)


def test_rc_013_change_is_printed_as_yaml_of_the_file(
    appliance: Callable[..., Any], tmp_path: Path
) -> None:
    log = tmp_path / "engine.log"
    log.write_text(f"{arguments(max_num_batched_tokens=4096, enforce_eager=True)}\n{NO_CACHE}")

    said = appliance("doctor", "--log", log).out

    assert "  change: memory: {max_num_batched_tokens: 2048}\n" in said


def test_rc_014_estimate_of_the_engine_becomes_a_change_of_the_context(
    doctor: Callable[..., dict[str, Any]], file: Callable[..., Path]
) -> None:
    line = ENGINE + (
        "ValueError: To serve at least one request with the model's max seq len (262144), (8.0 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (1.25 GiB). Based on the available memory, the estimated "
        "maximum model length is 40975. Try increasing `gpu_memory_utilization`"
    )

    found = doctor("Available KV cache memory: 1.25 GiB", line, status=1)

    assert found["code"] == "KV_TOO_SMALL"
    assert found["changes"][0] == {"model": {"max_model_len": 40960}}
    assert found["memory"].endswith("= 1.25 for the KV cache, 8 needed")
    assert_accepted(file, found["changes"][0])


def test_rc_017_memory_that_ends_while_graphs_are_captured_is_told_from_other_ends(
    doctor: Callable[..., dict[str, Any]], file: Callable[..., Path]
) -> None:
    capture = "(Worker_TP0 pid=80) Capturing CUDA graphs (decode, FULL):  43%|####3     | 3/7"

    during, before = doctor(capture, OOM, status=1), doctor(OOM, capture, status=1)

    assert (during["code"], before["code"]) == ("GRAPH_OOM", "CUDA_OOM")
    assert during["changes"][0] == {"execution": {"enforce_eager": True}}
    assert_accepted(file, during["changes"][0])


def test_rc_026_triton_that_cannot_lower_for_volta_is_named(
    doctor: Callable[..., dict[str, Any]],
) -> None:
    line = 'python3: /triton/lib/Conversion/TritonGPUToLLVM.cpp:187: Assertion `!(srcMmaLayout && dstMmaLayout) && "Unexpected mma -> mma layout conversion"\' failed.'

    found = doctor("INFO serving", line, status=134)

    assert found["code"] == "TRITON_VOLTA_LOWERING"
    assert "prefix_caching" in found["fix"]
