"""What a check says: one status, one sentence with the observed value, one remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Outcome of one check on one thing."""

    PASS = "pass"  # noqa: S105 - a verdict, not a password
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"


class Severity(StrEnum):
    """What a bad outcome does: `hard` refuses the start, `soft` warns, `info` is only said."""

    HARD = "hard"
    SOFT = "soft"
    INFO = "info"


@dataclass(frozen=True)
class CheckResult:
    """Judgement of one check on one GPU, pair or host.

    Attributes:
        id: Check id such as `ecc.dbe.volatile`.
        scope: `host`, `gpu:UUID` or `pair:UUID,UUID`.
        status: Outcome after severity for the plan.
        observed: What was measured, with units.
        expected: What the policy asks for.
        message: One sentence.
        remedy: What to do now, empty when there is nothing to do.
        remedy_scope: restart_container, reload_driver, reset_gpu, reboot, power_cycle,
            hardware_service, edit_config
            or none.
        source: The read behind it: nvml, sysfs, kmsg, cuda, state, config or events.
        severity: What a bad outcome does under this plan.
        value: The observed value as a number, which an override's bound is compared with; None when
            it has none.
        fixed: Whether no override may soften it.
        overridden_by: Who accepted it, None when nobody did.
        since: When a latched fault was first seen (ISO time), None when it is not latched.
    """

    id: str
    scope: str
    status: Status
    observed: str
    expected: str
    message: str
    remedy: str = ""
    remedy_scope: str = "none"
    source: str = "nvml"
    severity: Severity = Severity.HARD
    value: float | None = None
    fixed: bool = False
    overridden_by: str | None = None
    since: str | None = None
