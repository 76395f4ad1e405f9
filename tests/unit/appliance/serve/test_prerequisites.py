"""Shared memory, before anything is loaded."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from small_volume import small_volume

from appliance.serve import prerequisites
from appliance.serve.prerequisites import queue_bytes, small_shm
from appliance.units import MIB

if TYPE_CHECKING:
    from appliance.plan.launch_plan import LaunchPlan

PlanMaker = Callable[..., "LaunchPlan"]
CPU = {"device": "cpu"}
CUDA = {"device": "cuda"}
NEEDED = "/shm: 242 MiB free for the queues between the engine's processes, got "


@pytest.fixture
def shm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A /dev/shm of the size that the test names."""
    with small_volume(tmp_path / "shm", request.param) as made:
        yield made.path


@pytest.mark.parametrize(
    ("shm", "seen"), [("64m", "64 MiB"), ("200m", "200 MiB")], indirect=["shm"]
)
def test_shared_memory_too_small_for_the_queues_is_refused_with_both_numbers(
    plan: PlanMaker, shm: Path, seen: str
) -> None:
    fault = small_shm(plan(execution=CPU), shm)

    assert fault is not None
    assert f"{NEEDED}{seen}; set memory.shm_size to 16GiB" in str(fault)
    assert str(fault).startswith("error[SHM_TOO_SMALL] ")


@pytest.mark.parametrize("shm", ["242m"], indirect=True)
def test_shared_memory_of_what_the_message_asks_for_is_enough(plan: PlanMaker, shm: Path) -> None:
    assert small_shm(plan(execution=CPU), shm) is None


@pytest.mark.parametrize("shm", ["64m"], indirect=True)
@pytest.mark.parametrize(
    ("device", "cut", "refused"),
    [(CUDA, (1, 1), False), (CUDA, (2, 1), True), (CUDA, (1, 2), True), (CPU, (1, 1), True)],
)
def test_only_engines_of_several_processes_need_it(
    plan: PlanMaker, shm: Path, device: dict[str, str], cut: tuple[int, int], refused: bool
) -> None:
    parallel = {"tensor_parallel": cut[0], "pipeline_parallel": cut[1]}

    assert (small_shm(plan(execution=device, parallel=parallel), shm) is not None) == refused


def test_queues_without_shared_memory_are_left_to_the_engine(
    plan: PlanMaker, tmp_path: Path
) -> None:
    assert small_shm(plan(execution=CPU), tmp_path / "absent") is None


def test_sizes_are_those_of_the_engine_that_is_installed() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("no engine is installed")
    root = Path(spec.origin).parent
    queue = (root / "distributed/device_communicators/shm_broadcast.py").read_text()
    answer, chunks = re.findall(
        r"max_chunk_bytes: int = ([\d* ]+),\n\s+max_chunks: int = (\d+),", queue
    )[0]
    calls = re.findall(r'"VLLM_MQ_MAX_CHUNK_BYTES_MB", "(\d+)"', (root / "envs.py").read_text())

    product = 1
    for factor in answer.split("*"):
        product *= int(factor)
    assert product == prerequisites.ANSWER_CHUNK_BYTES
    assert int(chunks) == prerequisites.QUEUE_CHUNKS
    assert [int(each) * MIB for each in calls] == [prerequisites.CALL_CHUNK_BYTES]
    assert "self.max_chunk_bytes + self.metadata_size\n        ) * self.max_chunks" in queue
    assert "MessageQueue(1, 1)" in (root / "v1/executor/multiproc_executor.py").read_text()
    assert queue_bytes(1) == (24 * MIB + 2) * 10
