"""The supervisor's loop: the thin edge around the state machine.

One thread owns the state. Everything that can block (gate, engine, canary, watch) works on threads
of its own and posts what it learns; the loop turns ten times a second whatever they do, and
publishes one immutable snapshot a turn, from which the admin port answers.
"""

from __future__ import annotations

import queue
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.errors import ExitCode, Fault
from appliance.serve.board import Slot, Traffic
from appliance.serve.child import EngineEnd
from appliance.serve.diagnose import Diagnosis, diagnose
from appliance.serve.drain import Drain, DrainOutcome, terminate_s
from appliance.serve.engine import (
    Answered,
    Canaried,
    EngineRun,
    Gone,
    GpuLine,
    NotMoving,
    Rejected,
    Report,
    work,
)
from appliance.serve.health import Snapshot
from appliance.serve.ladder import Rung, Settings, next_rung
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
from appliance.serve.outside import Ended, GateOutcome, Outside
from appliance.serve.progress import Health, WatchStatus

if TYPE_CHECKING:
    from appliance.serve.canary import CanaryReport

TURN_S = 0.1
CANARY_GRACE_S = 5.0
"""The canary knows the start deadline and says better why it was missed; it gets to speak first."""

DRIFT_EVERY_S = 10.0

_FromThread = Report | GateOutcome | GpuFaulted | StopRequested | BaseException


class Supervisor:
    """One run of the appliance, from the gate to the exit code."""

    def __init__(self, settings: Settings, outside: Outside, *, recent_ends: int = 0) -> None:
        """Prepare a run; nothing is started yet."""
        plan = settings.plan
        self._outside = outside
        self._log = outside.log
        self._settings = settings
        self._policy = Policy(plan.run.canary, plan.run.on_gpu_fault)
        self._state = State()
        self._events: queue.SimpleQueue[tuple[EngineRun | None, _FromThread]] = queue.SimpleQueue()
        self._engine: EngineRun | None = None
        self._drain: Drain | None = None
        self._deadline: tuple[str, float] | None = None
        self._start_deadline = 0.0
        self._rungs: tuple[str, ...] = ()
        self._canary: CanaryReport | None = None
        self._gate: dict[str, Any] | None = None
        self._engine_end = EngineEnd(None)
        self._done = False
        self._phase_since = self._beat = time.monotonic()
        self._started_at = time.time()
        self._recent_ends = recent_ends
        self._drift = False
        self._drift_next = 0.0
        self._gpus = outside.watch_gpus(
            lambda fault: self._events.put((None, GpuFaulted(fault))), self._stalled_s
        )
        self.snapshot = self._snapshot()

    # ---- called from other threads and from signal handlers ---------------------------------

    def request_stop(self) -> None:
        """Drain and end; again: give up what is still in flight."""
        self._events.put((None, StopRequested()))

    def beat_age_s(self) -> float:
        """Return the seconds since the loop turned last."""
        return time.monotonic() - self._beat

    def _crash(self, error: BaseException) -> None:
        self._events.put((None, error))

    # ---- the loop --------------------------------------------------------------------------

    def run(self) -> Ended:
        """Supervise until the run is over.

        Raises:
            BaseException: What a thread of the appliance died of; the engine is then being killed.
        """
        work("gate", lambda: self._events.put((None, self._outside.gate())), self._crash)
        try:
            while not self._done:
                self._turn()
        except BaseException:
            if self._engine is not None:
                self._engine.kill()
            raise
        self.snapshot = self._snapshot()
        code = ExitCode.BUG if self._state.exit_code is None else self._state.exit_code
        fault = None if code is ExitCode.OK else self._state.fault
        tail = () if self._engine is None else self._engine.tail()
        end = self._engine_end
        return Ended(code, fault, end.leftover, tail, end.returncode)

    def refuse(self, exit_code: ExitCode, fault: Fault) -> None:
        """Show on the admin port why no run was begun."""
        refused = replace(self._state, phase=Phase.STOPPED, exit_code=exit_code, fault=fault)
        self._state = refused
        self.snapshot = self._snapshot()

    def hold(self, seconds: float) -> bool:
        """Keep a refused run from ending; True if it was told to stop meanwhile."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            self._beat = now
            try:
                _, event = self._events.get(timeout=min(TURN_S, until - now))
            except queue.Empty:
                continue
            if isinstance(event, StopRequested):
                return True
        return False

    def _turn(self) -> None:
        try:
            source, event = self._events.get(timeout=TURN_S)
        except queue.Empty:
            pass
        else:
            if isinstance(event, BaseException):
                raise event
            if source is None or source is self._engine:
                self._take_in(event)
        self._check_times()
        self._beat = time.monotonic()
        self.snapshot = self._snapshot()

    def _take_in(self, event: Report | GateOutcome | GpuFaulted | StopRequested) -> None:
        """Turn what a thread learned into an event of the machine."""
        match event:
            case StopRequested():
                self._log.info("serve.stop_requested", phase=self._state.phase.value)
                self._apply(event)
            case GpuFaulted():
                self._apply(event)
            case GateOutcome():
                self._apply(self._gated(event))
            case Answered():
                self._apply(EngineAnswered())
            case Canaried(report):
                self._canary = report
                self._apply(CanaryPassed())
            case Rejected(diagnosis):
                fault = diagnosis.fault("engine")
                self._apply(StartFailed(fault, self._next_rung(diagnosis)))
            case GpuLine(diagnosis):
                self._apply(GpuFaulted(diagnosis.fault("engine")))
            case NotMoving(status, diagnosis):
                self._apply(self._not_moving(status, diagnosis))
            case Gone(end):
                self._apply(self._gone(end))

    def _apply(self, event: Event) -> None:
        before = self._state
        self._state, actions = transition(before, event, self._policy)
        if self._state.phase is not before.phase:
            self._phase_since = time.monotonic()
            self._log_phase(before)
        if self._state.latched is not None and before.latched is None:
            self._log.error("serve.gpu_fault", fault=str(self._state.latched))
        for action in actions:
            self._perform(action)

    def _log_phase(self, before: State) -> None:
        state = self._state
        fields: dict[str, str | int] = {"before": before.phase.value, "phase": state.phase.value}
        if state.phase is Phase.LOADING:
            fields["attempt"] = state.attempt
        if state.fault is not None and state.fault is not before.fault:
            fields["cause"] = state.fault.code
        if state.exit_code is not None:
            fields["exit_code"] = int(state.exit_code)
        self._log.emit("info", "serve.phase", {**fields})

    # ---- what threads learned, as events of the machine --------------------------------------

    def _gated(self, outcome: GateOutcome) -> Event:
        self._gate = outcome.report
        if outcome.fault is not None:
            return Refused(outcome.exit_code, outcome.fault)
        self._gpus.start()
        self._settings = replace(self._settings, adjustments=outcome.adjustments)
        for reason in outcome.adjustments.reasons:
            self._log.warning("gate.adjustment", reason=reason)
        return GatePassed()

    def _next_rung(self, diagnosis: Diagnosis) -> Rung | None:
        if not self._settings.plan.run.ladder or diagnosis.gpu_fault:
            return None
        return next_rung(self._settings, diagnosis, self._rungs)

    def _not_moving(self, status: WatchStatus, diagnosis: Diagnosis) -> Event:
        cause = f"{diagnosis.code}: {diagnosis.what} ({' | '.join(diagnosis.evidence)[:400]})"
        seen = f"{status.waited_s:.0f} s ({status.detail}); {cause}"
        if status.health is Health.GONE:
            what = "the engine must keep its port open"
            fault = Fault("ENGINE_DIED", "engine", what, f"it closed {seen}", diagnosis.fix)
            return Stalled(ExitCode.ENGINE_DIED, fault)
        stall_s = self._settings.plan.run.stall_s
        what = f"the engine must make progress within {stall_s:g} s (runtime.stall)"
        fault = Fault("ENGINE_STALLED", "engine", what, f"none for {seen}", diagnosis.fix)
        return Stalled(ExitCode.STALLED, fault)

    def _gone(self, end: EngineEnd) -> Event:
        self._engine_end = end
        tail = () if self._engine is None else self._engine.tail()
        kills = self._outside.oom_kills()
        diagnosis = diagnose(tail, returncode=end.returncode, oom_kills=kills)
        self._log.info("engine.end", returncode=end.returncode, leftover=end.leftover)
        if self._state.phase in {Phase.LOADING, Phase.CANARY}:
            code = diagnosis.exit_code(ExitCode.ENGINE_START)
            return EngineEnded(code, diagnosis.fault("engine"), self._next_rung(diagnosis))
        if diagnosis.gpu_fault:
            return EngineEnded(ExitCode.GPU_FAULT, diagnosis.fault("engine"))
        seen = f"{diagnosis.code}: {' | '.join(diagnosis.evidence)[:400]}"
        what = "the engine must run until it is told to stop"
        return EngineEnded(
            ExitCode.ENGINE_DIED, Fault("ENGINE_DIED", "engine", what, seen, diagnosis.fix)
        )

    # ---- actions ---------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        now = time.monotonic()
        plan = self._settings.plan
        match action:
            case Action.SPAWN:
                self._spawn()
            case Action.OPEN_TRAFFIC:
                self._open_traffic()
            case Action.CLOSE_TRAFFIC:
                self._close_traffic()
            case Action.ARM_START:
                self._start_deadline = now + plan.run.startup_timeout_s
                self._deadline = ("start", self._start_deadline)
            case Action.ARM_DRAIN:
                self._deadline = None
                self._drain = Drain(timeout_s=plan.server.drain_timeout_s, now=now)
            case Action.ARM_TERMINATE:
                in_flight = self._outside.board.read(Slot.IN_FLIGHT)
                self._deadline = ("terminate", now + terminate_s(in_flight))
            case Action.DISARM:
                self._deadline = None
            case Action.EXIT:
                self._done = True
            case _:
                self._order(action, now)

    def _order(self, action: Action, now: float) -> None:
        engine = self._engine
        if engine is None:
            return
        if action is Action.RUN_CANARY:
            self._deadline = ("start", self._start_deadline + CANARY_GRACE_S)
            engine.run_canary(max(1.0, self._start_deadline - now))
        elif action is Action.TERMINATE:
            engine.terminate()
        elif action is Action.KILL:
            engine.kill()

    def _spawn(self) -> None:
        rung = self._state.rung
        if rung is not None:
            self._rungs = (*self._rungs, rung.name)
            self._settings = rung.settings
            self._log.warning("serve.safer_settings", change=rung.name, cause=rung.reason)
        self._canary = None

        def post(report: Report) -> None:
            self._events.put((engine, report))

        engine = EngineRun(self._settings, self._outside, post, self._crash)
        self._engine = engine
        engine.start()

    def _open_traffic(self) -> None:
        plan, seen = self._settings.plan, self._canary
        self._outside.board.traffic = Traffic.OPEN
        self._log.info(
            "serve.ready",
            url=f"http://{plan.server.host}:{plan.server.port}/v1",
            model=plan.model.served_name,
            canary_tokens_per_second=None if seen is None else round(seen.tokens_per_second, 1),
            safer_settings=self._rungs,
        )
        if self._engine is not None:
            self._engine.watch()

    def _close_traffic(self) -> None:
        draining = self._state.phase in {Phase.DRAINING, Phase.STOPPING}
        self._outside.board.traffic = Traffic.DRAINING if draining else Traffic.CLOSED
        if self._engine is not None:
            self._engine.stop_watching()

    # ---- time ------------------------------------------------------------------------------

    def _check_times(self) -> None:
        now = time.monotonic()
        if self._state.phase is Phase.DRAINING:
            self._check_drain(now)
        if self._deadline is not None and now >= self._deadline[1]:
            kind, self._deadline = self._deadline[0], None
            if kind == "terminate":
                self._apply(TerminateTimedOut())
            elif self._engine is not None:
                self._engine.reject_late()
        if now >= self._drift_next:
            self._drift_next = now + DRIFT_EVERY_S
            self._check_drift()

    def _check_drain(self, now: float) -> None:
        if self._drain is None:
            return
        in_flight = self._outside.board.read(Slot.IN_FLIGHT)
        match self._drain.observe(in_flight, now):
            case DrainOutcome.DRAINED:
                self._apply(Drained())
            case DrainOutcome.TIMED_OUT:
                limit_s = self._settings.plan.server.drain_timeout_s
                what = f"requests must end within {limit_s:g} s (server.drain_timeout)"
                fix = "raise server.drain_timeout, and the container's stop_grace_period with it"
                fault = Fault("DRAIN_TIMEOUT", "drain", what, f"{in_flight} in flight", fix)
                self._apply(DrainTimedOut(fault))
            case DrainOutcome.WAITING:
                pass

    def _check_drift(self) -> None:
        drift = self._outside.config_sha256() != self._settings.plan.config_sha256
        if drift and not self._drift:
            path = self._settings.plan.config_path
            self._log.warning("config.drift", path=path, effect="restart to use the edited file")
        self._drift = drift

    def _stalled_s(self) -> float | None:
        """Return the seconds without progress, for the sampler's thread."""
        waited = 0.0 if self._engine is None else self._engine.watch_status.waited_s
        return waited if waited > 0 else None

    def _snapshot(self) -> Snapshot:
        engine = self._engine
        return Snapshot(
            state=self._state,
            settings=self._settings,
            phase_since=self._phase_since,
            started_at=self._started_at,
            engine_pid=None if engine is None else engine.pid,
            engine_alive=engine is not None and engine.alive,
            watch=WatchStatus() if engine is None else engine.watch_status,
            rungs=self._rungs,
            canary=self._canary,
            gate=self._gate,
            recent_ends=self._recent_ends,
            gpus=self._gpus.status(),
            config_drift=self._drift,
        )
