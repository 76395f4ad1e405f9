"""From judgements to one verdict and its exit code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from healthchecks.result import CheckResult, Severity, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from healthchecks.plan import GatePlan

OK, NO_GPU, CONTAINER, REFUSED, UNMEASURED = 0, 11, 12, 20, 21
"""Exit codes of docs/operations.md."""

_NO_GPU_STATES = frozenset({"driver_not_loaded", "library_not_found"})
_CONTAINER_CHECKS = frozenset({"host.shm"})


@dataclass(frozen=True)
class Verdict:
    """`status` is pass, warn, fail or unknown; `exit_code` is that of the command line."""

    status: Status
    exit_code: int


def no_gpu(plan: GatePlan, names: Sequence[str]) -> tuple[CheckResult, ...]:
    """Return the results of a plan without GPUs: every check is skipped and says so."""
    reason = "the plan uses no GPU"
    return tuple(
        CheckResult(
            id=f"{name}.all",
            scope="host",
            status=Status.SKIPPED,
            observed="not evaluated",
            expected="",
            message=f"skipped: {reason}",
            source="config",
            severity=Severity.INFO,
        )
        for name in names
        if not plan.uses_gpu
    )


def soften_unknown(results: Sequence[CheckResult], on_unknown: str) -> tuple[CheckResult, ...]:
    """Turn UNKNOWN of hard checks into WARN where the operator allows it; fixed checks stay."""
    if on_unknown != "allow":
        return tuple(results)
    return tuple(
        replace(
            result, status=Status.WARN, message=f"{result.message} (allowed by gate.on_unknown)"
        )
        if result.status is Status.UNKNOWN and not result.fixed
        else result
        for result in results
    )


def verdict_of(results: Sequence[CheckResult], mode: str = "enforce") -> Verdict:
    """Return the worst outcome: fail, then unknown of a hard check, then warn, then pass.

    An UNKNOWN of a soft check warns. Under `mode: warn` nothing refuses.
    """
    failed = [result for result in results if result.status is Status.FAIL]
    unknown = [result for result in results if result.status is Status.UNKNOWN]
    blind = any(result.severity is Severity.HARD or result.fixed for result in unknown)
    if mode != "enforce" and (failed or blind):
        return Verdict(Status.WARN, OK)
    if failed:
        return Verdict(Status.FAIL, _refusal(failed))
    if blind:
        return Verdict(Status.UNKNOWN, UNMEASURED)
    warned = unknown or any(result.status is Status.WARN for result in results)
    return Verdict(Status.WARN if warned else Status.PASS, OK)


def _refusal(failed: Sequence[CheckResult]) -> int:
    if any(result.id == "nvml.init" and result.observed in _NO_GPU_STATES for result in failed):
        return NO_GPU
    if all(result.id in _CONTAINER_CHECKS for result in failed):
        return CONTAINER
    return REFUSED
