"""The supervisor's state machine: a pure function from state and event to state and actions.

Nothing here reads a clock, a file or a process. Phases:

    gating -> loading -> canary -> ready -> draining -> stopping -> stopped
                 ^---- retry ----- faulted ------------------------^

`faulted` means: the engine is being killed or has ended, and either the next rung of the ladder or
an exit code is decided. With `runtime.on_gpu_fault: report` a GPU fault only latches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, Literal

from appliance.errors import ExitCode, Fault

if TYPE_CHECKING:
    from appliance.serve.ladder import Rung


class Phase(StrEnum):
    """What the supervisor is doing."""

    GATING = "gating"
    LOADING = "loading"
    CANARY = "canary"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    FAULTED = "faulted"
    STOPPED = "stopped"


class Action(Enum):
    """What the edge does after a transition, in the order given."""

    SPAWN = auto()
    RUN_CANARY = auto()
    OPEN_TRAFFIC = auto()
    CLOSE_TRAFFIC = auto()
    TERMINATE = auto()
    KILL = auto()
    ARM_START = auto()
    ARM_DRAIN = auto()
    ARM_TERMINATE = auto()
    DISARM = auto()
    EXIT = auto()


@dataclass(frozen=True)
class Policy:
    """What of the plan decides transitions."""

    canary: bool
    on_gpu_fault: Literal["drain_exit", "exit", "report"]


@dataclass(frozen=True)
class State:
    """Where the run stands.

    Attributes:
        phase: What it is doing.
        exit_code: The code it will end with, None while nothing ends it.
        fault: Why it ends or is degraded.
        rung: Settings of the next start after a failed one.
        attempt: Starts of the engine so far.
        latched: GPU fault that keeps the appliance from being ready; only a new run clears it.
        cut: Requests in flight were given up because a second stop signal asked for it.
    """

    phase: Phase = Phase.GATING
    exit_code: ExitCode | None = None
    fault: Fault | None = None
    rung: Rung | None = None
    attempt: int = 0
    latched: Fault | None = None
    cut: bool = False


@dataclass(frozen=True)
class GatePassed:
    """The gate lets the engine start."""


@dataclass(frozen=True)
class Refused:
    """The gate, or a check before the engine, does not let it start."""

    exit_code: ExitCode
    fault: Fault


@dataclass(frozen=True)
class EngineAnswered:
    """The engine's own `/health` said 200 for the first time."""


@dataclass(frozen=True)
class CanaryPassed:
    """Real generations came back sane."""


@dataclass(frozen=True)
class StartFailed:
    """The engine lives but will not do; `rung` is what to try next."""

    fault: Fault
    rung: Rung | None


@dataclass(frozen=True)
class EngineEnded:
    """Nothing of the engine is left; fault and exit code say why, `rung` what to try next."""

    exit_code: ExitCode
    fault: Fault
    rung: Rung | None = None


@dataclass(frozen=True)
class Stalled:
    """No counter moved and no answer came for `runtime.stall`."""

    exit_code: ExitCode
    fault: Fault


@dataclass(frozen=True)
class GpuFaulted:
    """A hard hardware fault while the engine runs."""

    fault: Fault


@dataclass(frozen=True)
class StopRequested:
    """A stop signal, or POST /drain."""


@dataclass(frozen=True)
class Drained:
    """No request is in flight any more."""


@dataclass(frozen=True)
class DrainTimedOut:
    """Requests were still in flight when `server.drain_timeout` was over."""

    fault: Fault


@dataclass(frozen=True)
class TerminateTimedOut:
    """The engine did not end after it had been asked to."""


Event = (
    GatePassed
    | Refused
    | EngineAnswered
    | CanaryPassed
    | StartFailed
    | EngineEnded
    | Stalled
    | GpuFaulted
    | StopRequested
    | Drained
    | DrainTimedOut
    | TerminateTimedOut
)
Step = tuple[State, tuple[Action, ...]]

_SPAWN = (Action.CLOSE_TRAFFIC, Action.SPAWN, Action.ARM_START)
_DRAIN = (Action.CLOSE_TRAFFIC, Action.ARM_DRAIN)
_TERMINATE = (Action.CLOSE_TRAFFIC, Action.TERMINATE, Action.ARM_TERMINATE)
_KILL = (Action.DISARM, Action.CLOSE_TRAFFIC, Action.KILL)
_EXIT = (Action.DISARM, Action.EXIT)
_STARTING = (Phase.LOADING, Phase.CANARY)


def transition(state: State, event: Event, policy: Policy) -> Step:  # noqa: PLR0911 - a table
    """Return what comes of an event; an event that means nothing in this phase changes nothing."""
    match event:
        case StopRequested():
            return _stop(state)
        case EngineEnded():
            return _engine_ended(state, event)
        case Stalled() if state.phase is Phase.READY:
            return _fail(state, event.exit_code, event.fault)
        case GpuFaulted():
            return _gpu_faulted(state, event.fault, policy)
        case Drained() | DrainTimedOut() | TerminateTimedOut():
            return _ending(state, event)
        case GatePassed() | Refused() | EngineAnswered() | CanaryPassed() | StartFailed():
            return _starting(state, event, policy)
        case _:
            return state, ()


def _starting(
    state: State,
    event: GatePassed | Refused | EngineAnswered | CanaryPassed | StartFailed,
    policy: Policy,
) -> Step:
    match event, state.phase:
        case GatePassed(), Phase.GATING:
            return replace(state, phase=Phase.LOADING, attempt=1), _SPAWN
        case Refused(), Phase.GATING:
            ended = replace(state, exit_code=event.exit_code, fault=event.fault)
            return replace(ended, phase=Phase.STOPPED), (Action.EXIT,)
        case EngineAnswered(), Phase.LOADING if policy.canary:
            return replace(state, phase=Phase.CANARY), (Action.RUN_CANARY,)
        case (EngineAnswered(), Phase.LOADING) | (CanaryPassed(), Phase.CANARY):
            ready = replace(state, phase=Phase.READY, fault=None, rung=None)
            return ready, (Action.DISARM, Action.OPEN_TRAFFIC)
        case StartFailed(), Phase.LOADING | Phase.CANARY:
            failed = replace(state, phase=Phase.FAULTED, fault=event.fault, rung=event.rung)
            code = None if event.rung is not None else ExitCode.ENGINE_START
            return replace(failed, exit_code=code), _KILL
        case _:
            return state, ()


def _engine_ended(state: State, event: EngineEnded) -> Step:
    told_to_end = state.phase is not Phase.DRAINING or state.exit_code is ExitCode.GPU_FAULT
    if state.exit_code is not None and told_to_end:
        return replace(state, phase=Phase.STOPPED), _EXIT
    if state.phase is Phase.FAULTED and state.rung is not None:
        return _again(state, state.rung)
    if state.phase in _STARTING and event.rung is not None:
        return _again(replace(state, fault=event.fault), event.rung)
    ended = replace(state, phase=Phase.STOPPED, exit_code=event.exit_code, fault=event.fault)
    return ended, _EXIT


def _again(state: State, rung: Rung) -> Step:
    """Start once more with the settings of a rung."""
    attempt = state.attempt + 1
    return replace(state, phase=Phase.LOADING, attempt=attempt, rung=rung, exit_code=None), _SPAWN


def _fail(state: State, exit_code: ExitCode, fault: Fault) -> Step:
    return replace(state, phase=Phase.FAULTED, exit_code=exit_code, fault=fault), _KILL


def _gpu_faulted(state: State, fault: Fault, policy: Policy) -> Step:
    if state.phase in {Phase.GATING, Phase.STOPPING, Phase.FAULTED, Phase.STOPPED}:
        return state, ()
    latched = replace(state, latched=state.latched or fault)
    if policy.on_gpu_fault == "report":
        return latched, ()
    if policy.on_gpu_fault == "drain_exit" and state.phase is Phase.READY:
        draining = replace(latched, phase=Phase.DRAINING)
        return replace(draining, exit_code=ExitCode.GPU_FAULT, fault=fault), _DRAIN
    if policy.on_gpu_fault == "drain_exit" and state.phase is Phase.DRAINING:
        return replace(latched, exit_code=ExitCode.GPU_FAULT, fault=fault), ()
    return _fail(latched, ExitCode.GPU_FAULT, fault)


def _stop(state: State) -> Step:  # noqa: PLR0911 - one row a phase
    match state.phase:
        case Phase.GATING:
            return replace(state, phase=Phase.STOPPED, exit_code=ExitCode.OK), (Action.EXIT,)
        case Phase.LOADING | Phase.CANARY:
            return replace(state, phase=Phase.STOPPING, exit_code=ExitCode.OK), _TERMINATE
        case Phase.READY:
            return replace(state, phase=Phase.DRAINING, exit_code=ExitCode.OK), _DRAIN
        case Phase.DRAINING:
            return replace(state, phase=Phase.STOPPING, cut=True), _TERMINATE
        case Phase.STOPPING:
            return state, _KILL
        case Phase.FAULTED if state.exit_code is None:
            return replace(state, rung=None, exit_code=ExitCode.OK), ()
        case Phase.FAULTED | Phase.STOPPED:
            return state, ()


def _ending(state: State, event: Drained | DrainTimedOut | TerminateTimedOut) -> Step:
    match event, state.phase:
        case Drained(), Phase.DRAINING:
            return replace(state, phase=Phase.STOPPING), _TERMINATE
        case DrainTimedOut(), Phase.DRAINING:
            # A GPU fault that began the drain keeps its own, more telling code.
            late = state.exit_code is not ExitCode.GPU_FAULT
            code = ExitCode.DRAIN_TIMEOUT if late else ExitCode.GPU_FAULT
            fault = event.fault if late else state.fault
            return replace(state, phase=Phase.STOPPING, exit_code=code, fault=fault), _TERMINATE
        case TerminateTimedOut(), Phase.STOPPING:
            return state, _KILL
        case _:
            return state, ()
