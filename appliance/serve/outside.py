"""What the supervisor is given instead of reaching for it, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.errors import ExitCode, Fault
    from appliance.plan.adjustments import Adjustments
    from appliance.serve.board import Board
    from appliance.serve.client import EngineClient
    from appliance.serve.diagnose import Observation
    from appliance.serve.events import EventLog
    from appliance.serve.gpus import GpuWatch
    from appliance.serve.ladder import Settings


@dataclass(frozen=True)
class GateOutcome:
    """What the gate decided; `fault` is None when the engine may start."""

    exit_code: ExitCode
    fault: Fault | None
    adjustments: Adjustments
    report: dict[str, Any]


@dataclass(frozen=True)
class Launch:
    """One start of the engine: its command line and its whole environment."""

    command: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True)
class Outside:
    """The world around one run.

    Attributes:
        log: Event log.
        board: Page shared with the gateway.
        client: HTTP to the engine.
        gate: Judges the machine; blocks.
        launch: Renders settings into one start of the engine.
        observe: Looks at GPUs and processes while nothing moves; blocks for seconds at most.
        config_sha256: Hash of the configuration file as it is now, None if it cannot be read.
        watch_gpus: Makes the watch of the GPUs from what is called on a fault and what tells the
            seconds without progress; `start` it once the gate has passed.
        oom_kills: How often the kernel has killed a process of this container for memory.
    """

    log: EventLog
    board: Board
    client: EngineClient
    gate: Callable[[], GateOutcome]
    launch: Callable[[Settings], Launch]
    observe: Callable[[], Observation]
    config_sha256: Callable[[], str | None]
    watch_gpus: Callable[[Callable[[Fault], None], Callable[[], float | None]], GpuWatch]
    oom_kills: Callable[[], int]


@dataclass(frozen=True)
class Ended:
    """How a run ended, and what of it is kept for later.

    Attributes:
        exit_code: Code of docs/operations.md.
        fault: Why, None after a clean stop.
        leftover: `PID:STATE` of processes that survived SIGKILL.
        tail: Last lines of the engine.
        returncode: The engine's own exit status, None if it never ended or never ran.
    """

    exit_code: ExitCode
    fault: Fault | None = None
    leftover: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    returncode: int | None = None
