"""What the probes answer: pure functions of one snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from appliance.errors import ExitCode
from appliance.serve.gpus import GpuStatus
from appliance.serve.machine import Phase, State
from appliance.serve.progress import Health, WatchStatus

if TYPE_CHECKING:
    from appliance.serve.canary import CanaryReport
    from appliance.serve.ladder import Settings

BEAT_LIMIT_S = 10.0
"""The supervisor's loop turns ten times a second; this long without a turn, it is stuck."""

_CURED_BY_RESTART = frozenset({ExitCode.ENGINE_START, ExitCode.ENGINE_DIED, ExitCode.STALLED})


@dataclass(frozen=True)
class Snapshot:
    """Everything the admin port tells, published whole by the supervisor's loop.

    Attributes:
        state: State of the machine.
        settings: What the current start was rendered from.
        phase_since: Monotonic time at which the phase began.
        started_at: Wall-clock time at which this run began.
        engine_pid: Process id of the API server, None while there is none.
        engine_alive: Whether that process is known to run.
        watch: Last word of the progress watch.
        rungs: Names of the safer settings in force.
        canary: What the start-up canary saw.
        gate: The gate's report.
        recent_ends: Ends that the restart budget counts.
        gpus: What the background sampler says of the GPUs.
        config_drift: The configuration file differs from the one this run was started with.
    """

    state: State
    settings: Settings
    phase_since: float
    started_at: float
    engine_pid: int | None = None
    engine_alive: bool = False
    watch: WatchStatus = field(default_factory=WatchStatus)
    rungs: tuple[str, ...] = ()
    canary: CanaryReport | None = None
    gate: dict[str, Any] | None = None
    recent_ends: int = 0
    gpus: GpuStatus = field(default_factory=GpuStatus)
    config_drift: bool = False


@dataclass(frozen=True)
class Verdict:
    """One probe's answer."""

    ok: bool
    reason: str
    detail: str = ""


def startup(snapshot: Snapshot) -> Verdict:
    """Gate passed, and the engine is loading within its deadline or further than that."""
    phase = snapshot.state.phase
    if phase is Phase.GATING:
        return Verdict(ok=False, reason="GATING", detail="the gate has not decided yet")
    if phase is Phase.STOPPED or (phase is Phase.FAULTED and snapshot.state.rung is None):
        return Verdict(ok=False, reason=_reason(snapshot), detail=_detail(snapshot))
    return Verdict(ok=True, reason=phase.value.upper())


def live(snapshot: Snapshot, *, beat_age_s: float) -> Verdict:
    """Whether a restart would not help: supervisor turning, engine there and making progress.

    Neither a slow load nor a hardware fault fails it; a restart loop would only hide the latter.
    Devices that the host took away from this container are the exception: a new one gets them.
    """
    if beat_age_s > BEAT_LIMIT_S:
        detail = f"no turn of the supervisor's loop for {beat_age_s:.0f} s"
        return Verdict(ok=False, reason="SUPERVISOR_STUCK", detail=detail)
    state = snapshot.state
    budget = state.fault is not None and state.fault.code == "RESTART_BUDGET"
    if state.exit_code in _CURED_BY_RESTART and not budget:
        return Verdict(ok=False, reason=_reason(snapshot), detail=_detail(snapshot))
    if snapshot.gpus.nvml_lost:
        return Verdict(ok=False, reason="NVML_LOST", detail=snapshot.gpus.reason)
    if state.phase is Phase.READY:
        return _engine_lives(snapshot)
    return Verdict(ok=True, reason=_reason(snapshot))


def ready(snapshot: Snapshot, *, beat_age_s: float) -> Verdict:
    """Whether requests may come: canary passed, not draining, progress, no latched GPU fault."""
    state = snapshot.state
    if state.phase is not Phase.READY:
        return Verdict(ok=False, reason=_reason(snapshot), detail=_detail(snapshot))
    if state.latched is not None:
        return Verdict(ok=False, reason="GPU_FAULT", detail=str(state.latched))
    alive = live(snapshot, beat_age_s=beat_age_s)
    if not alive.ok:
        return alive
    if not snapshot.gpus.ready:
        return Verdict(ok=False, reason="GPU_NOT_FIT", detail=snapshot.gpus.reason)
    if snapshot.watch.health is not Health.MOVING:
        detail = f"{snapshot.watch.detail} for {snapshot.watch.waited_s:.0f} s"
        return Verdict(ok=False, reason="NO_PROGRESS", detail=detail)
    return Verdict(ok=True, reason="READY")


def _engine_lives(snapshot: Snapshot) -> Verdict:
    if not snapshot.engine_alive:
        return Verdict(ok=False, reason="ENGINE_DIED", detail="the engine's process has ended")
    watch = snapshot.watch
    if watch.health in {Health.STALLED, Health.GONE}:
        reason = "ENGINE_STALLED" if watch.health is Health.STALLED else "ENGINE_DIED"
        return Verdict(ok=False, reason=reason, detail=f"{watch.detail} for {watch.waited_s:.0f} s")
    return Verdict(ok=True, reason="READY")


def _reason(snapshot: Snapshot) -> str:
    state = snapshot.state
    over = state.phase in {Phase.FAULTED, Phase.STOPPED}
    if state.fault is not None and (over or state.exit_code not in {None, ExitCode.OK}):
        return state.fault.code
    return state.phase.value.upper()


def _detail(snapshot: Snapshot) -> str:
    return "" if snapshot.state.fault is None else str(snapshot.state.fault)
