"""The state machine as a table: phase and event to phase, exit code and actions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ExitCode, Fault
from appliance.serve.ladder import Rung
from appliance.serve.machine import (
    Action,
    CanaryPassed,
    Drained,
    DrainTimedOut,
    EngineAnswered,
    EngineEnded,
    Event,
    GatePassed,
    GpuFaulted,
    Phase,
    Policy,
    Refused,
    Stalled,
    StartFailed,
    State,
    StopRequested,
    TerminateTimedOut,
    transition,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.serve.ladder import Settings

POLICY = Policy(canary=True, on_gpu_fault="drain_exit")
FAULT = Fault("SOME_FAULT", "engine", "must run", "nothing", "run it")
OTHER = Fault("OTHER_FAULT", "engine", "must run", "nothing", "run it")
READY = State(phase=Phase.READY, attempt=1)
DIED = EngineEnded(ExitCode.ENGINE_DIED, FAULT)


def play(state: State, *events: Event, policy: Policy = POLICY) -> State:
    for event in events:
        state, _ = transition(state, event, policy)
    return state


@pytest.fixture
def rung(settings: Callable[..., Settings]) -> Rung:
    return Rung("execution.enforce_eager=true", settings(), "GRAPH_OOM")


def test_start_goes_through_loading_and_canary_to_ready() -> None:
    phases = [State().phase]
    state = State()
    for event in (GatePassed(), EngineAnswered(), CanaryPassed()):
        state, _ = transition(state, event, POLICY)
        phases.append(state.phase)

    assert phases == [Phase.GATING, Phase.LOADING, Phase.CANARY, Phase.READY]
    assert state.exit_code is None


def test_start_without_canary_opens_traffic_on_the_first_answer() -> None:
    loading = play(State(), GatePassed())

    state, actions = transition(loading, EngineAnswered(), replace(POLICY, canary=False))

    assert state.phase is Phase.READY
    assert actions == (Action.DISARM, Action.OPEN_TRAFFIC)


def test_refused_gate_ends_with_the_gates_code_and_starts_nothing() -> None:
    state, actions = transition(State(), Refused(ExitCode.GATE_UNKNOWN, FAULT), POLICY)

    assert (state.phase, state.exit_code) == (Phase.STOPPED, ExitCode.GATE_UNKNOWN)
    assert actions == (Action.EXIT,)


@pytest.mark.parametrize("answered", [False, True])
def test_failed_start_without_a_rung_ends_with_40(answered: bool) -> None:
    state = play(State(), GatePassed(), *([EngineAnswered()] if answered else []))

    failed, actions = transition(state, StartFailed(FAULT, None), POLICY)
    ended, last = transition(failed, DIED, POLICY)

    assert failed.phase is Phase.FAULTED
    assert Action.KILL in actions
    assert (ended.phase, ended.exit_code) == (Phase.STOPPED, ExitCode.ENGINE_START)
    assert ended.fault == FAULT
    assert last == (Action.DISARM, Action.EXIT)


def test_failed_start_with_a_rung_starts_again_once_the_old_engine_is_gone(rung: Rung) -> None:
    failed = play(State(), GatePassed(), EngineAnswered(), StartFailed(FAULT, rung))

    again, actions = transition(failed, DIED, POLICY)

    assert (again.phase, again.attempt, again.exit_code) == (Phase.LOADING, 2, None)
    assert actions == (Action.CLOSE_TRAFFIC, Action.SPAWN, Action.ARM_START)
    assert again.rung is rung


def test_engine_that_ends_while_loading_tries_the_rung_at_once(rung: Rung) -> None:
    loading = play(State(), GatePassed())

    again = play(loading, EngineEnded(ExitCode.ENGINE_START, FAULT, rung))

    assert (again.phase, again.attempt) == (Phase.LOADING, 2)


def test_engine_that_ends_when_ready_ends_the_run_with_41() -> None:
    ended, actions = transition(READY, DIED, POLICY)

    assert (ended.phase, ended.exit_code) == (Phase.STOPPED, ExitCode.ENGINE_DIED)
    assert actions == (Action.DISARM, Action.EXIT)


def test_engine_that_ends_by_itself_while_draining_ends_the_run_with_41() -> None:
    ended = play(READY, StopRequested(), DIED)

    assert ended.exit_code is ExitCode.ENGINE_DIED


def test_stall_kills_and_ends_with_43() -> None:
    stalled, actions = transition(READY, Stalled(ExitCode.STALLED, FAULT), POLICY)
    ended = play(stalled, DIED)

    assert Action.KILL in actions
    assert (ended.exit_code, ended.fault) == (ExitCode.STALLED, FAULT)


def test_stop_drains_then_terminates_and_ends_with_0() -> None:
    draining, first = transition(READY, StopRequested(), POLICY)
    stopping, second = transition(draining, Drained(), POLICY)
    ended = play(stopping, DIED)

    assert first == (Action.CLOSE_TRAFFIC, Action.ARM_DRAIN)
    assert second == (Action.CLOSE_TRAFFIC, Action.TERMINATE, Action.ARM_TERMINATE)
    assert (ended.phase, ended.exit_code) == (Phase.STOPPED, ExitCode.OK)


def test_drain_that_times_out_terminates_and_ends_with_50() -> None:
    ended = play(READY, StopRequested(), DrainTimedOut(OTHER), DIED)

    assert (ended.exit_code, ended.fault) == (ExitCode.DRAIN_TIMEOUT, OTHER)


def test_second_stop_cuts_the_drain_and_third_kills() -> None:
    cut, second = transition(play(READY, StopRequested()), StopRequested(), POLICY)
    killed, third = transition(cut, StopRequested(), POLICY)

    assert (cut.phase, cut.exit_code, cut.cut) == (Phase.STOPPING, ExitCode.OK, True)
    assert Action.TERMINATE in second
    assert Action.KILL in third
    assert killed.exit_code is ExitCode.OK


def test_engine_deaf_to_termination_is_killed() -> None:
    stopping = play(READY, StopRequested(), Drained())

    _, actions = transition(stopping, TerminateTimedOut(), POLICY)

    assert Action.KILL in actions


@pytest.mark.parametrize("before", [(), (EngineAnswered(),)])
def test_stop_before_ready_terminates_without_a_drain(before: tuple[Event, ...]) -> None:
    state, actions = transition(play(State(), GatePassed(), *before), StopRequested(), POLICY)

    assert (state.phase, state.exit_code) == (Phase.STOPPING, ExitCode.OK)
    assert Action.TERMINATE in actions


def test_stop_while_gating_ends_at_once() -> None:
    state, actions = transition(State(), StopRequested(), POLICY)

    assert (state.phase, state.exit_code) == (Phase.STOPPED, ExitCode.OK)
    assert actions == (Action.EXIT,)


def test_stop_between_two_starts_gives_up_the_second(rung: Rung) -> None:
    failed = play(State(), GatePassed(), StartFailed(FAULT, rung))

    ended = play(failed, StopRequested(), DIED)

    assert (ended.phase, ended.exit_code) == (Phase.STOPPED, ExitCode.OK)


@pytest.mark.parametrize(
    ("answer", "phase", "code", "action"),
    [
        ("drain_exit", Phase.DRAINING, ExitCode.GPU_FAULT, Action.ARM_DRAIN),
        ("exit", Phase.FAULTED, ExitCode.GPU_FAULT, Action.KILL),
        ("report", Phase.READY, None, None),
    ],
)
def test_gpu_fault_is_latched_and_answered_by_policy(
    answer: str, phase: Phase, code: ExitCode | None, action: Action | None
) -> None:
    policy = Policy(canary=True, on_gpu_fault=answer)  # type: ignore[arg-type]

    state, actions = transition(READY, GpuFaulted(FAULT), policy)

    assert (state.phase, state.exit_code, state.latched) == (phase, code, FAULT)
    assert action in (*actions, None)


def test_gpu_fault_keeps_its_code_when_the_drain_it_began_times_out() -> None:
    ended = play(READY, GpuFaulted(FAULT), DrainTimedOut(OTHER), DIED)

    assert (ended.exit_code, ended.fault) == (ExitCode.GPU_FAULT, FAULT)


def test_gpu_fault_while_loading_kills_whatever_the_policy_drains() -> None:
    state, actions = transition(play(State(), GatePassed()), GpuFaulted(FAULT), POLICY)

    assert (state.phase, state.exit_code) == (Phase.FAULTED, ExitCode.GPU_FAULT)
    assert Action.KILL in actions


def test_late_start_failure_means_nothing_once_ready() -> None:
    assert transition(READY, StartFailed(FAULT, None), POLICY) == (READY, ())


EVENTS: tuple[Event, ...] = (
    GatePassed(), Refused(ExitCode.GATE_FAILED, FAULT), EngineAnswered(), CanaryPassed(),
    StartFailed(FAULT, None), DIED, Stalled(ExitCode.STALLED, FAULT), GpuFaulted(FAULT),
    StopRequested(), Drained(), DrainTimedOut(FAULT), TerminateTimedOut(),
)  # fmt: skip


@given(st.lists(st.sampled_from(EVENTS), max_size=12))
def test_any_history_ends_with_a_code_and_never_leaves_stopped(history: list[Event]) -> None:
    state = State()
    for event in history:
        before = state
        state, actions = transition(state, event, POLICY)

        if before.phase is Phase.STOPPED:
            assert (state, actions) == (before, ()) or isinstance(event, EngineEnded)
        if Action.EXIT in actions:
            assert state.phase is Phase.STOPPED
            assert state.exit_code is not None
        if Action.OPEN_TRAFFIC in actions:
            assert state.phase is Phase.READY
            assert state.exit_code is None
        if state.exit_code not in {None, ExitCode.OK}:
            assert state.fault is not None
