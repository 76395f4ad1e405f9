"""From log lines and an exit status to one named cause with its evidence; pure functions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.errors import ExitCode, Fault
from appliance.serve.diagnose_rules import (
    BROADCAST_WAIT,
    CAPTURE_MARK,
    EXCEPTION,
    GENERIC,
    NOISE,
    RULES,
    Rule,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EVIDENCE_LINES = 3
_GPU_RULES = tuple(rule for rule in RULES if rule.gpu_fault)
_SIGKILL = frozenset({-9, 137})
_BUSY_PERCENT = 90
_HANGS: Mapping[str, tuple[str, str]] = {
    "WORKER_DEAD": (
        "a rank's process is gone",
        "read the lines before its death; `dmesg` tells more",
    ),
    "COMPILING": ("kernels are being compiled", "wait; keep the cache directories on a volume"),
    "STALLED_COLLECTIVE": (
        "the GPUs spin in a collective that never ends",
        "run `appliance gate`; start with gate.p2p.policy: off and custom all-reduce off",
    ),
    "STUCK_KERNEL": (
        "one GPU is stuck in a kernel",
        "read the kernel log for an Xid on that GPU",
    ),
    "UNKNOWN": (
        "the engine makes no progress and nothing tells why",
        "read its last lines, which `appliance doctor` prints; report them",
    ),
}
"""What may be behind an engine that waits for itself, and what to do."""

_IDLE_POWER_SHARE = 0.3
OWN_END = "the engine ended by itself"


@dataclass(frozen=True)
class Diagnosis:
    """One cause.

    Attributes:
        code: Name of the cause.
        what: The cause in a few words.
        fix: What to do now.
        evidence: Lines and readings it rests on, at most three.
        facts: Numbers found in the evidence, by name.
        gpu_fault: The hardware is at fault.
    """

    code: str
    what: str
    fix: str
    evidence: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    gpu_fault: bool = False

    def fault(self, where: str) -> Fault:
        """Return the one-line message of this cause; `where` is the part that failed."""
        seen = " | ".join(self.evidence) or "no line that names a cause"
        return Fault(self.code, where, self.what, seen[:600], self.fix)

    def exit_code(self, otherwise: ExitCode) -> ExitCode:
        """Return 42 for a hardware fault and `otherwise` for all else."""
        return ExitCode.GPU_FAULT if self.gpu_fault else otherwise


@dataclass(frozen=True)
class RankReading:
    """What was seen of one rank while nothing moved; None where nothing could be read."""

    rank: int
    alive: bool
    utilization_percent: int | None = None
    power_share: float | None = None


@dataclass(frozen=True)
class Observation:
    """What was seen from outside while the engine was silent."""

    ranks: tuple[RankReading, ...] = ()
    compiler: str | None = None


def diagnose(
    lines: Sequence[str], *, returncode: int | None = None, oom_kills: int = 0
) -> Diagnosis:
    """Name the cause behind an engine that ended or never came up.

    Args:
        lines: The engine's log, oldest first.
        returncode: Its exit status, negative for a signal; None when it still runs or is unknown.
        oom_kills: How often the kernel killed a process of this container for memory.
    """
    if returncode in _SIGKILL and oom_kills > 0:
        seen = (f"killed by SIGKILL, memory.events oom_kill {oom_kills}",)
        rule = next(r for r in RULES if r.code == "HOST_OOM")
        return Diagnosis(rule.code, rule.what, rule.fix, seen)
    for rule in RULES:
        found = _apply(rule, lines, returncode)
        if found is not None:
            return found
    return _unnamed(lines, returncode)


def diagnose_start_timeout(lines: Sequence[str], observation: Observation) -> Diagnosis:
    """Name the cause behind an engine that still runs when its start deadline is over."""
    waiting = diagnose_hang(lines, observation)
    if waiting.code != "UNKNOWN":
        return waiting
    captures = [line for line in lines if CAPTURE_MARK.search(line)]
    if captures and CAPTURE_MARK.search(lines[-1]):
        what = "capturing CUDA graphs did not end within startup.timeout"
        return Diagnosis(
            "GRAPH_CAPTURE", what, "set execution.enforce_eager: true", (captures[-1],)
        )
    return Diagnosis(
        "START_TIMEOUT",
        "the engine gave no answer within startup.timeout",
        "raise startup.timeout, or put the checkpoint on faster storage",
        telling(lines)[-EVIDENCE_LINES:],
    )


def diagnose_hang(lines: Sequence[str], observation: Observation) -> Diagnosis:
    """Tell apart what looks the same in the log: an engine that waits for itself."""
    notices = [line for line in lines if BROADCAST_WAIT.search(line)]
    evidence = tuple(notices[-1:])
    dead = [reading for reading in observation.ranks if not reading.alive]
    busy = [r for r in observation.ranks if (r.utilization_percent or 0) >= _BUSY_PERCENT]
    cold = [r for r in busy if r.power_share is not None and r.power_share < _IDLE_POWER_SHARE]
    if dead:
        return _hang("WORKER_DEAD", *evidence, f"rank {dead[0].rank} has no process")
    if observation.compiler is not None:
        return _hang("COMPILING", *evidence, f"{observation.compiler} runs")
    if observation.ranks and len(cold) == len(observation.ranks) > 1:
        seen = ", ".join(
            f"rank {r.rank}: {r.utilization_percent} % at {r.power_share:.0%} of its power limit"
            for r in cold
        )
        return _hang("STALLED_COLLECTIVE", *evidence, seen)
    if 0 < len(busy) < len(observation.ranks):
        return _hang("STUCK_KERNEL", *evidence, f"rank {busy[0].rank} alone is busy")
    return _hang("UNKNOWN", *(evidence or telling(lines)[-1:]))


def _hang(code: str, *evidence: str) -> Diagnosis:
    what, fix = _HANGS[code]
    return Diagnosis(code, what, fix, evidence)


def hang_of(lines: Sequence[str], message: str) -> Diagnosis | None:
    """Return what a run found out about its silent engine, None when it said something else.

    Args:
        lines: The engine's last lines.
        message: What the run said, its code and the readings, which no log carries.
    """
    code = next(
        (name for name in re.findall(r"[A-Z]+(?:_[A-Z]+)*", message) if name in _HANGS), None
    )
    if code is None:
        return None
    what, fix = _HANGS[code]
    notices = [line for line in lines if BROADCAST_WAIT.search(line)]
    return Diagnosis(code, what, fix, (*notices[-1:], message))


def gpu_fault_in(line: str) -> Diagnosis | None:
    """Return the hardware fault that one line names, None for every other line."""
    for rule in _GPU_RULES:
        found = _apply(rule, (line,), None)
        if found is not None:
            return found
    return None


def telling(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the lines without those that every run has: requests served, leaks at the end."""
    return tuple(line for line in lines if not NOISE.search(line))


def root_cause(lines: Sequence[str]) -> str | None:
    """Return the first exception of the log that is not merely the news of another one."""
    generic: str | None = None
    for line in lines:
        match = EXCEPTION.search(line)
        if match is None:
            continue
        if not GENERIC.search(line):
            return match["text"]
        generic = generic or match["text"]
    return generic


def _apply(rule: Rule, lines: Sequence[str], returncode: int | None) -> Diagnosis | None:
    if rule.returncodes and returncode not in rule.returncodes:
        return None
    if rule.pattern is None:
        return Diagnosis(rule.code, rule.what, rule.fix, (f"exit status {returncode}",))
    armed = rule.after is None
    evidence: list[str] = []
    facts: dict[str, str] = {}
    for line in lines:
        if not armed and rule.after is not None and rule.after.search(line):
            armed = True
            continue
        match = rule.pattern.search(line) if armed else None
        if match is not None:
            evidence.append(line.strip())
            facts |= {name: text for name, text in match.groupdict().items() if text is not None}
    if not evidence:
        return None
    return Diagnosis(
        rule.code, rule.what, rule.fix, tuple(evidence[:EVIDENCE_LINES]), facts, rule.gpu_fault
    )


def _unnamed(lines: Sequence[str], returncode: int | None) -> Diagnosis:
    cause = root_cause(lines)
    status = _status_text(returncode)
    evidence = (cause, status) if cause is not None else (*telling(lines)[-1:], status)
    ended = "no line of the engine names a cause" if returncode is None else OWN_END
    fix = "read its last lines, which `appliance doctor` prints"
    return Diagnosis("ENGINE_FAILED", ended, fix, evidence)


def _status_text(returncode: int | None) -> str:
    if returncode is None:
        return "exit status unknown"
    return f"signal {-returncode}" if returncode < 0 else f"exit status {returncode}"
