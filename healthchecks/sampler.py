"""One background sampler: probes and readiness read its cached verdict and never touch NVML."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from healthchecks.collect import Depth, collect
from healthchecks.context import Context
from healthchecks.events import Ear
from healthchecks.facts import HostFacts, XidFacts
from healthchecks.history import advance, refresh
from healthchecks.hysteresis import Hysteresis, Leave
from healthchecks.judge import judge
from healthchecks.plan import GatePlan, Kind
from healthchecks.policy import policy_of
from healthchecks.rates import Rates
from healthchecks.result import CheckResult, Severity, Status
from healthchecks.state import State
from healthchecks.state_file import StateFile, StateUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

RUNNING_CHECKS = (
    "nvml",
    "presence",
    "ecc",
    "pages",
    "inforom",
    "xid",
    "latches",
    "pcie",
    "nvlink",
    "thermal",
    "power",
    "spin",
)
"""The cheap part of the gate: reads only, no CUDA, nothing the engine itself would trip."""

_CGROUP_LOST = "unknown_error"
_LOST_AFTER = 2
STALE_INTERVALS = 3
"""Samples that may be missed before the last one counts as too old."""

_MEASURED_ONCE = ("pcie.rate", "pcie.width_degraded")
"""Judged at start under load; while serving the link may idle, so they are not judged again."""


class Listener(Protocol):
    """Hears Xids as they happen."""

    def heard(self) -> list[tuple[str, int]]:
        """Return (UUID, Xid) of everything since the last call."""
        ...

    def close(self) -> None:
        """Stop listening."""
        ...


@dataclass(frozen=True)
class SampleVerdict:
    """What the last samples say.

    Attributes:
        ready: Whether hardware lets the engine take requests; false before the first sample.
        status: Worst outcome of the last sample after hysteresis.
        results: Every judgement.
        facts: What was read.
        sampled_at_s: Monotonic time of the sample, None before the first.
        samples: Samples so far.
        nvml_lost: NVML lost its devices to a change of the container's cgroup: only a new container
            cures it, so liveness may fail. No other hardware verdict may.
    """

    ready: bool = False
    status: Status = Status.UNKNOWN
    results: tuple[CheckResult, ...] = ()
    facts: HostFacts = field(default_factory=HostFacts)
    sampled_at_s: float | None = None
    samples: int = 0
    nvml_lost: bool = False

    @property
    def hard(self) -> tuple[CheckResult, ...]:
        """Judgements that refuse, unknown ones of hard checks included."""
        return tuple(
            result
            for result in self.results
            if result.status is Status.FAIL
            or (
                result.status is Status.UNKNOWN
                and (result.severity is Severity.HARD or result.fixed)
            )
        )

    @property
    def warnings(self) -> tuple[CheckResult, ...]:
        """Judgements that warn."""
        return tuple(result for result in self.results if result.status is Status.WARN)

    @property
    def reason(self) -> str:
        """One line: the first hard fault, else the first warning, else empty."""
        first = next(iter((*self.hard, *self.warnings)), None)
        return "" if first is None else f"{first.id}: {first.message}"


def _read(plan: GatePlan) -> HostFacts:
    return collect(plan, Depth(cuda=False))


class Sampler:
    """Samples the plan's GPUs on its own thread; `latest()` returns at once."""

    def __init__(
        self,
        plan_gate: Mapping[str, Any],
        uuids: Sequence[str],
        interval_s: float,
        *,
        kind: Kind = "single",
        leave: Leave | None = None,
        stalled_s: Callable[[], float | None] | None = None,
        on_change: Callable[[SampleVerdict], None] | None = None,
        read: Callable[[GatePlan], HostFacts] = _read,
        listen: Callable[[Sequence[str]], Listener] = Ear,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nothing is read before `start()` or `sample()`.

        Args:
            plan_gate: Section `gate` of the plan.
            uuids: GPUs of the plan; none means that there is nothing to watch.
            interval_s: Time between samples.
            kind: Kind of the plan, which severities depend on.
            leave: Where a warm GPU counts as cool again.
            stalled_s: Seconds without a token while requests wait, None when none wait.
            on_change: Called on the sampler's thread when `ready` or the hard faults change.
            read: Reads the machine.
            listen: Starts to listen for Xids.
            clock: Monotonic time in seconds.
        """
        policy = policy_of(plan_gate)
        watched = () if policy.mode == "off" else tuple(uuids)
        self._plan = GatePlan(kind=kind, uuids=watched, policy=policy)
        self._interval_s = interval_s
        self._stale_s = STALE_INTERVALS * (interval_s + policy.timeout_s)
        self._hysteresis = Hysteresis(leave or Leave())
        self._rates = Rates()
        self._stalled_s, self._on_change = stalled_s, on_change
        self._read, self._listen, self._clock = read, listen, clock
        self._listener: Listener | None = None
        self._heard: dict[tuple[str, int], int] = {}
        self._latest = SampleVerdict(
            ready=not watched, status=Status.UNKNOWN if watched else Status.PASS
        )
        self._remembered: frozenset[str] = frozenset()
        self._lost = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; a plan without GPUs needs none."""
        if self._plan.uuids and self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="gpu-sampler", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread after the sample in hand."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=self._plan.policy.timeout_s + self._interval_s)
        if self._listener is not None:
            self._listener.close()

    def latest(self) -> SampleVerdict:
        """Return the cached verdict, not ready once it is too old; never blocks."""
        latest = self._latest
        if latest.sampled_at_s is None or self._clock() - latest.sampled_at_s < self._stale_s:
            return latest
        return replace(latest, ready=False, status=Status.UNKNOWN)

    def sample(self) -> SampleVerdict:
        """Take one sample now and return the verdict after it."""
        if self._listener is None:
            self._listener = self._listen(self._plan.uuids)
        facts = self._with_events(self._read(self._plan), self._listener.heard())
        facts = replace(facts, stalled_s=self._stalled_s() if self._stalled_s else None)
        facts = self._rates.add(facts, self._clock())
        context = Context(facts, self._plan, state=State(), now=datetime.now(UTC))
        report = judge(context, RUNNING_CHECKS)
        judged = [result for result in report.checks if result.id not in _MEASURED_ONCE]
        settled = self._hysteresis.settle(judged, facts, self._clock())
        self._lost = self._lost + 1 if facts.nvml == _CGROUP_LOST else 0
        self._publish(
            SampleVerdict(
                ready=self._hysteresis.ready or self._plan.policy.mode == "warn",
                status=_worst(settled),
                results=settled,
                facts=facts,
                sampled_at_s=self._clock(),
                samples=self._latest.samples + 1,
                nvml_lost=self._lost >= _LOST_AFTER,
            )
        )
        self._remember(facts)
        return self._latest

    def _loop(self) -> None:
        while not self._stop.is_set():
            self.sample()
            self._stop.wait(self._interval_s)

    def _publish(self, verdict: SampleVerdict) -> None:
        before, self._latest = self._latest, verdict
        changed = before.ready != verdict.ready or _ids(before.hard) != _ids(verdict.hard)
        if changed and self._on_change is not None:
            self._on_change(verdict)

    def _with_events(self, facts: HostFacts, heard: Sequence[tuple[str, int]]) -> HostFacts:
        """Add every Xid heard since start; where the kernel log shows it too, once is enough."""
        for event in heard:
            self._heard[event] = self._heard.get(event, 0) + 1
        places = {gpu.uuid: gpu.index for gpu in facts.gpus}
        logged = {(event.gpu, event.xid) for event in facts.kernel.xids}
        fresh = tuple(
            XidFacts(xid, places[uuid], count, "events")
            for (uuid, xid), count in self._heard.items()
            if uuid in places and (places[uuid], xid) not in logged
        )
        return replace(facts, kernel=replace(facts.kernel, xids=(*facts.kernel.xids, *fresh)))

    def _remember(self, facts: HostFacts) -> None:
        """Write the state file when a new hard fault shows, so that the next start knows of it."""
        faults = _ids(self._latest.hard)
        if not faults - self._remembered:
            return
        self._remembered = self._remembered | faults
        file = StateFile(Path(self._plan.policy.state_dir))
        try:
            with file.locked():
                state = refresh(file.load(), facts)
                file.save(advance(state, facts, datetime.now(UTC)), "sampler")
        except StateUnavailableError:
            return  # the start gate has warned that nothing can be remembered


def _ids(results: Sequence[CheckResult]) -> frozenset[str]:
    return frozenset(f"{result.id} {result.scope}" for result in results)


def _worst(results: Sequence[CheckResult]) -> Status:
    found = {result.status for result in results}
    return next(
        (status for status in (Status.FAIL, Status.UNKNOWN, Status.WARN) if status in found),
        Status.PASS,
    )
