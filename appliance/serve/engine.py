"""One start of the engine: its process, first answer, canary and watch.

Everything here runs on threads of its own and posts what it learns; nothing here decides.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.serve.board import Slot
from appliance.serve.canary import CanaryError, CanaryReport, run_canary
from appliance.serve.child import EngineEnd, EngineProcess
from appliance.serve.client import EngineSilentError, EngineUnreachableError
from appliance.serve.diagnose import Diagnosis, diagnose_hang, diagnose_start_timeout, gpu_fault_in
from appliance.serve.effective import Effective
from appliance.serve.progress import WatchStatus
from appliance.serve.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.serve.ladder import Settings
    from appliance.serve.outside import Outside

TAIL_LINES = 600
_HTTP_OK = 200
_POLL_S = 0.25
_LEVEL = re.compile(r"(?:\([^)]*\) )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
_LEVELS = {
    "DEBUG": "debug",
    "INFO": "info",
    "WARNING": "warning",
    "ERROR": "error",
    "CRITICAL": "error",
}


@dataclass(frozen=True)
class Answered:
    """The engine's own `/health` said 200."""


@dataclass(frozen=True)
class Canaried:
    """The canary passed."""

    report: CanaryReport


@dataclass(frozen=True)
class Rejected:
    """The canary failed, or the start deadline passed."""

    diagnosis: Diagnosis


@dataclass(frozen=True)
class NotMoving:
    """The watch gave up on the engine."""

    status: WatchStatus
    diagnosis: Diagnosis


@dataclass(frozen=True)
class GpuLine:
    """A line of the engine names a hardware fault."""

    diagnosis: Diagnosis


@dataclass(frozen=True)
class Gone:
    """Nothing of the engine is left, or what is left cannot be killed."""

    end: EngineEnd


Report = Answered | Canaried | Rejected | NotMoving | GpuLine | Gone


def work(name: str, target: Callable[[], None], on_crash: Callable[[BaseException], None]) -> None:
    """Run `target` on a thread of its own; a failure of the appliance itself ends the run."""

    def guarded() -> None:
        try:
            target()
        except BaseException as error:  # noqa: BLE001 - the supervisor's loop raises it again
            on_crash(error)

    threading.Thread(target=guarded, name=name, daemon=True).start()


def line_level(text: str) -> str:
    """Return the level at which a line of the engine is logged: its own, `info` if it has none."""
    match = _LEVEL.match(text)
    return "info" if match is None else _LEVELS[match["level"]]


class EngineRun:
    """One start of the engine, from spawn to the last process."""

    def __init__(
        self,
        settings: Settings,
        outside: Outside,
        post: Callable[[Report], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        """Prepare; `start` makes the process."""
        self.settings = settings
        self._outside = outside
        self._post = post
        self._on_crash = on_crash
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = EngineProcess(self._line, self._end)
        self._over = threading.Event()
        self._watch: Watch | None = None
        self._gpu_told = False
        self._effective = Effective()

    @property
    def pid(self) -> int | None:
        """Process id of the API server."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the API server is known to run."""
        return self._process.alive

    @property
    def watch_status(self) -> WatchStatus:
        """Last word of the watch."""
        return WatchStatus() if self._watch is None else self._watch.status

    def tail(self) -> tuple[str, ...]:
        """Return the last lines of the engine, oldest first."""
        while True:
            try:
                return tuple(self._tail)
            except RuntimeError:  # a line came in meanwhile
                continue

    def start(self) -> None:
        """Spawn the engine and wait for its first answer in the background."""
        launch = self._outside.launch(self.settings)
        self._outside.log.info("engine.start", command=" ".join(launch.command))
        self._process.start(launch.command, launch.environment)
        work("engine-answer", self._await_answer, self._on_crash)

    def run_canary(self, timeout_s: float) -> None:
        """Ask for real generations in the background."""

        def canary() -> None:
            try:
                report = run_canary(self._outside.client, self.settings.plan, timeout_s=timeout_s)
            except CanaryError as failure:
                self._post(Rejected(failure.diagnosis))
            else:
                self._say_if_slow(report)
                self._post(Canaried(report))

        work("canary", canary, self._on_crash)

    def reject_late(self) -> None:
        """Find out in the background why the start deadline passed, and say so."""

        def look() -> None:
            observation = self._outside.observe()
            self._post(Rejected(diagnose_start_timeout(self.tail(), observation)))

        work("look", look, self._on_crash)

    def watch(self) -> None:
        """Watch the engine's progress until it ends or `stop_watching`."""
        plan = self.settings.plan
        self._watch = Watch(
            self._outside.client,
            plan.model.served_name,
            stall_s=plan.run.stall_s,
            in_flight=lambda: self._outside.board.read(Slot.IN_FLIGHT),
            on_verdict=self._not_moving,
        )
        self._watch.start()

    def stop_watching(self) -> None:
        """End the watch."""
        if self._watch is not None:
            self._watch.stop()

    def terminate(self) -> None:
        """Ask the engine to end."""
        self._over.set()
        self._process.terminate()

    def kill(self) -> None:
        """Kill everything of the engine."""
        self._over.set()
        self._process.kill()

    def _say_if_slow(self, report: CanaryReport) -> None:
        least, got = self.settings.plan.run.min_decode_rate, report.tokens_per_second
        if least is not None and got < least:
            self._outside.log.warning("engine.slow", code="SLOW_BACKEND", want=least, got=got)

    def _await_answer(self) -> None:
        while not self._over.wait(_POLL_S):
            try:
                if self._outside.client.get("/health", timeout_s=5.0).status == _HTTP_OK:
                    other = self._effective.mismatch(self.settings.plan)
                    self._post(Answered() if other is None else Rejected(other))
                    return
            except (EngineUnreachableError, EngineSilentError):
                continue

    def _line(self, text: str) -> None:
        self._tail.append(text)
        self._effective.note(text)
        self._outside.log.emit(line_level(text), "engine", {"line": text})
        fault = None if self._gpu_told else gpu_fault_in(text)
        if fault is not None:
            self._gpu_told = True
            self._post(GpuLine(fault))

    def _not_moving(self, status: WatchStatus) -> None:
        self._post(NotMoving(status, diagnose_hang(self.tail(), self._outside.observe())))

    def _end(self, end: EngineEnd) -> None:
        self._over.set()
        self.stop_watching()
        self._post(Gone(end))
