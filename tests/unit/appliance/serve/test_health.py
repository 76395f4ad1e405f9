"""What the probes say of a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from appliance.errors import ExitCode, Fault
from appliance.serve import health
from appliance.serve.board import Board, Slot
from appliance.serve.gpus import GpuStatus
from appliance.serve.health import Snapshot
from appliance.serve.ladder import Rung, Settings
from appliance.serve.machine import Phase, State
from appliance.serve.metrics import Exposition
from appliance.serve.progress import Health, WatchStatus

FAULT = Fault("SOME_CAUSE", "engine", "must run", "nothing", "run it")
BUDGET = replace(FAULT, code="RESTART_BUDGET")


@pytest.fixture
def snapshot(settings: Callable[..., Settings]) -> Callable[..., Snapshot]:
    """Return a snapshot of a phase; the engine lives in the phases in which it should."""

    def made(phase: Phase, *, watch: WatchStatus | None = None, **state: Any) -> Snapshot:
        alive = phase in {Phase.LOADING, Phase.CANARY, Phase.READY, Phase.DRAINING}
        return Snapshot(
            state=State(phase=phase, **state),
            settings=settings(),
            phase_since=0.0,
            started_at=0.0,
            engine_alive=alive,
            watch=watch or WatchStatus(),
        )

    return made


Maker = Callable[..., Snapshot]


def answers(snapshot: Snapshot, beat_age_s: float = 0.0) -> tuple[bool, bool, bool]:
    return (
        health.startup(snapshot).ok,
        health.live(snapshot, beat_age_s=beat_age_s).ok,
        health.ready(snapshot, beat_age_s=beat_age_s).ok,
    )


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (Phase.GATING, (False, True, False)),
        (Phase.LOADING, (True, True, False)),
        (Phase.CANARY, (True, True, False)),
        (Phase.READY, (True, True, True)),
        (Phase.DRAINING, (True, True, False)),
        (Phase.STOPPING, (True, True, False)),
    ],
)
def test_probes_flip_phase_by_phase(
    snapshot: Maker, phase: Phase, expected: tuple[bool, bool, bool]
) -> None:
    assert answers(snapshot(phase)) == expected


@pytest.mark.parametrize(
    ("code", "fault", "live"),
    [
        (ExitCode.ENGINE_START, FAULT, False),
        (ExitCode.ENGINE_DIED, FAULT, False),
        (ExitCode.STALLED, FAULT, False),
        (ExitCode.GPU_FAULT, FAULT, True),  # a restart loop would hide the fault
        (ExitCode.GATE_FAILED, FAULT, True),
        (ExitCode.ENGINE_DIED, BUDGET, True),  # a restart is what is held back
    ],
)
def test_live_fails_only_for_what_a_restart_cures(
    snapshot: Maker, code: ExitCode, fault: Fault, live: bool
) -> None:
    over = snapshot(Phase.STOPPED, exit_code=code, fault=fault)

    assert answers(over) == (False, live, False)
    assert health.ready(over, beat_age_s=0.0).reason == fault.code


def test_second_start_is_alive_and_starting(
    snapshot: Maker, settings: Callable[..., Settings]
) -> None:
    rung = Rung("execution.enforce_eager=true", settings(), "GRAPH_OOM")

    assert answers(snapshot(Phase.FAULTED, fault=FAULT, rung=rung)) == (True, True, False)


@pytest.mark.parametrize(
    ("watched", "live", "reason"),
    [
        (Health.SUSPECT, True, "NO_PROGRESS"),
        (Health.STALLED, False, "ENGINE_STALLED"),
        (Health.GONE, False, "ENGINE_DIED"),
    ],
)
def test_engine_without_progress_is_not_ready_first_and_not_alive_later(
    snapshot: Maker, watched: Health, live: bool, reason: str
) -> None:
    silent = snapshot(Phase.READY, watch=WatchStatus(watched, 61.0, "no answer"))

    assert answers(silent) == (True, live, False)
    assert health.ready(silent, beat_age_s=0.0).reason == reason


def test_engine_that_has_just_died_is_neither_ready_nor_alive(snapshot: Maker) -> None:
    dead = replace(snapshot(Phase.READY), engine_alive=False)

    assert answers(dead) == (True, False, False)


def test_latched_gpu_fault_takes_readiness_and_nothing_else(snapshot: Maker) -> None:
    latched = snapshot(Phase.READY, latched=FAULT)

    assert answers(latched) == (True, True, False)
    assert health.ready(latched, beat_age_s=0.0).reason == "GPU_FAULT"


def test_gpus_that_are_not_fit_take_readiness_only_and_lost_ones_liveness_too(
    snapshot: Maker,
) -> None:
    hot = replace(snapshot(Phase.READY), gpus=GpuStatus(ready=False, reason="thermal.gpu: hot"))
    lost = replace(snapshot(Phase.READY), gpus=GpuStatus(ready=False, nvml_lost=True))

    assert answers(hot) == (True, True, False)
    assert health.ready(hot, beat_age_s=0.0).reason == "GPU_NOT_FIT"
    assert answers(lost) == (True, False, False)
    assert health.live(lost, beat_age_s=0.0).reason == "NVML_LOST"


def test_loop_that_does_not_turn_is_not_alive(snapshot: Maker) -> None:
    assert answers(snapshot(Phase.READY), beat_age_s=11.0) == (True, False, False)
    assert health.live(snapshot(Phase.READY), beat_age_s=11.0).reason == "SUPERVISOR_STUCK"


def test_metrics_are_ours_and_then_the_engines_as_scraped(snapshot: Maker, tmp_path: Any) -> None:
    board = Board.create(tmp_path / "board")
    board.add(Slot.ACCEPTED, 5)
    board.add(Slot.TOO_MANY, 2)
    watch = WatchStatus(engine_metrics="vllm:num_requests_running 0.0\n", scraped_at=90.0)
    serving = snapshot(Phase.READY, watch=watch)

    text = Exposition(lambda: serving, board, lambda: 0.0).text(100.0).decode()

    assert "appliance_ready 1.0" in text
    assert "appliance_requests_accepted_total 5.0" in text
    assert 'appliance_requests_refused_total{why="too_many"} 2.0' in text
    assert "appliance_engine_metrics_age_seconds 10.0" in text
    assert text.endswith("vllm:num_requests_running 0.0\n")
