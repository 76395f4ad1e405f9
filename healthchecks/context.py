"""What a check is given, and the words it answers with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING

from healthchecks.facts import NOT_SHOWN, GpuFacts, HostFacts, PairFacts
from healthchecks.result import CheckResult, Severity, Status
from healthchecks.state import GpuState, State

if TYPE_CHECKING:
    from healthchecks.plan import GatePlan
    from healthchecks.policy import Policy

HARD, SOFT, INFO = Severity.HARD, Severity.SOFT, Severity.INFO


class Evidence(StrEnum):
    """What a value that was not read means.

    `live`: unknown. `lenient`: the recorded state does not show it, taken as healthy. `strict`: as
    lenient, but
    unknown where a start may not go on without it.
    """

    LIVE = "live"
    LENIENT = "lenient"
    STRICT = "strict"


@dataclass(frozen=True)
class Context:
    """One machine, one plan, and what is remembered of the machine."""

    facts: HostFacts
    plan: GatePlan
    evidence: Evidence = Evidence.LIVE
    state: State = field(default_factory=State)
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def policy(self) -> Policy:
        """Thresholds of the plan."""
        return self.plan.policy

    @cached_property
    def gpus(self) -> tuple[GpuFacts, ...]:
        """GPUs of the plan that were found, in rank order."""
        known = {gpu.uuid: gpu for gpu in self.facts.gpus}
        return tuple(known[uuid] for uuid in self.plan.uuids if uuid in known)

    @cached_property
    def pairs(self) -> tuple[PairFacts, ...]:
        """Ways between the GPUs of the plan; one that was not read comes with nothing in it."""
        known = {frozenset((pair.a, pair.b)): pair for pair in self.facts.pairs}
        status = {"*": "not_read" if self.evidence is Evidence.LIVE else NOT_SHOWN}
        return tuple(
            known.get(
                frozenset((a.index, b.index)), PairFacts(a.index, b.index, read_status=status)
            )
            for a, b in combinations(self.gpus, 2)
        )

    @property
    def parallel(self) -> bool:
        """Whether the plan uses more than one GPU."""
        return self.plan.kind != "single"

    @property
    def tensor(self) -> bool:
        """Whether the plan cuts every layer."""
        return self.plan.kind == "tp2"

    def remembered(self, gpu: GpuFacts) -> GpuState | None:
        """Return what the state file holds of a GPU, None at its first run."""
        return self.state.gpus.get(gpu.uuid or "")

    def days_since(self, at: str | None) -> float:
        """Return the days from an ISO time of the state file to now, 0 without one."""
        if at is None:
            return 0.0
        return (self.now - datetime.fromisoformat(at)).total_seconds() / 86_400

    def by_index(self, index: int) -> GpuFacts:
        """Return the GPU with an NVML index."""
        return next(gpu for gpu in self.facts.gpus if gpu.index == index)

    def p2p_severity(self) -> Severity:
        """Return what a pair without working peer access does under a tensor-parallel plan."""
        return {"require": HARD, "auto": SOFT}.get(self.policy.p2p, INFO)

    # The words below start a judgement: `context.on_gpu("ecc.mode", gpu).fails(...)`.

    def on_gpu(
        self, check: str, gpu: GpuFacts, severity: Severity = HARD, source: str = "nvml"
    ) -> Subject:
        """Return the subject of one check on one GPU."""
        return Subject(
            check,
            f"gpu:{gpu.uuid}",
            gpu_name(gpu),
            severity,
            source,
            self.evidence,
            gpu.read_status,
        )

    def on_pair(
        self, check: str, pair: PairFacts, severity: Severity, source: str = "nvml"
    ) -> Subject:
        """Return the subject of one check on one pair."""
        first, second = self.by_index(pair.a), self.by_index(pair.b)
        name = f"GPU {pair.a} and GPU {pair.b}"
        scope = f"pair:{first.uuid},{second.uuid}"
        return Subject(check, scope, name, severity, source, self.evidence, pair.read_status)

    def on_host(self, check: str, severity: Severity = HARD, source: str = "nvml") -> Subject:
        """Return the subject of one check on the host."""
        return Subject(check, "host", "host", severity, source, self.evidence, {})


@dataclass(frozen=True)
class Subject:
    """One check on one thing; each method ends the judgement."""

    id: str
    scope: str
    name: str
    severity: Severity
    source: str
    evidence: Evidence
    read_status: Mapping[str, str]

    def passes(self, observed: str, expected: str = "", message: str = "") -> CheckResult:
        """Return PASS."""
        return self._result(Status.PASS, observed, expected, message or f"{self.name}: {observed}")

    def fails(
        self,
        observed: str,
        expected: str,
        message: str,
        *,
        remedy: str = "",
        scope: str = "none",
        value: float | None = None,
        fixed: bool = False,
        since: str | None = None,
    ) -> CheckResult:
        """Return FAIL, WARN or, for information only, PASS, as the severity says."""
        status = {HARD: Status.FAIL, SOFT: Status.WARN, INFO: Status.PASS}[self.severity]
        result = self._result(status, observed, expected, f"{self.name}: {message}")
        return replace(
            result, remedy=remedy, remedy_scope=scope, value=value, fixed=fixed, since=since
        )

    def unknown(
        self, observed: str, expected: str, message: str, *, remedy: str = "", fixed: bool = False
    ) -> CheckResult:
        """Return UNKNOWN: it could not be measured."""
        result = self._result(Status.UNKNOWN, observed, expected, f"{self.name}: {message}")
        return replace(result, remedy=remedy, fixed=fixed)

    def skipped(self, reason: str) -> CheckResult:
        """Return SKIPPED with the reason."""
        return self._result(Status.SKIPPED, "not evaluated", "", f"{self.name}: {reason}")

    def missing(self, fact: str, expected: str, *, required: bool = False) -> CheckResult:
        """Judge a fact that is None: unknown, or skipped where a recorded state need not show it.

        `required` marks evidence without which even a recorded state cannot be called healthy.
        """
        status = self.read_status.get(fact) or self.read_status.get("*", "not_read")
        if self.evidence is Evidence.LIVE or status not in (NOT_SHOWN, "not_read"):
            return self.unknown(
                status, expected, f"{fact} could not be read ({status})", remedy=_READ_REMEDY
            )
        if required and self.evidence is Evidence.STRICT:
            return self.unknown(status, expected, f"{fact} is not shown by the record")
        return self.skipped(f"{fact} is not shown by the record and taken as healthy")

    def _result(self, status: Status, observed: str, expected: str, message: str) -> CheckResult:
        return CheckResult(
            id=self.id,
            scope=self.scope,
            status=status,
            observed=observed,
            expected=expected,
            message=message,
            source=self.source,
            severity=self.severity,
        )


_READ_REMEDY = (
    "see the driver's log (dmesg) and nvidia-smi on the host;"
    " gate.on_unknown: allow starts all the same"
)

Check = Callable[[Context], Iterator[CheckResult]]
"""A check takes the context and yields a judgement for everything it looks at."""


def gpu_name(gpu: GpuFacts) -> str:
    """Return how messages call a GPU: its index and, where known, its place on the bus."""
    return f"GPU {gpu.index}" + (f" ({gpu.bus_id})" if gpu.bus_id else "")
