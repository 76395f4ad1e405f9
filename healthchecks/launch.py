"""What the launch must change because of what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from healthchecks.result import CheckResult, Status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from healthchecks.context import Context
    from healthchecks.plan import Kind

NO_P2P = {"NCCL_P2P_DISABLE": "1"}
NO_CUSTOM_ALL_REDUCE = "--disable-custom-all-reduce"
_PAIR_FAULTS = frozenset({"pair.p2p", "pair.functional", "pair.collective"})
_BAD = (Status.WARN, Status.FAIL, Status.UNKNOWN)


@dataclass(frozen=True)
class Launch:
    """Variables and flags to add, the measurement behind each, and perhaps a better plan."""

    env: Mapping[str, str] = field(default_factory=dict[str, str])
    args: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    suggested_plan: Kind | None = None


def launch_of(context: Context, results: Sequence[CheckResult]) -> Launch:
    """Derive the adjustments of the judgements; a plan is suggested, never switched to."""
    env: dict[str, str] = {}
    args: list[str] = []
    reasons: list[str] = []
    for result in results:
        if result.id not in _PAIR_FAULTS or not _counts(context, result):
            continue
        env.update(_variables(context, result))
        args = [NO_CUSTOM_ALL_REDUCE] if context.tensor else []
        words = " ".join([*(f"{name}={value}" for name, value in env.items()), *args])
        reasons.append(f"{words}: {result.id} {result.observed}")
    return Launch(env, tuple(args), tuple(reasons), _suggested(context, results))


def _counts(context: Context, result: CheckResult) -> bool:
    """A pair without peer access passes under `off`, and is launched without P2P all the same."""
    if result.status in _BAD:
        # A pipeline without peer access is staged through the host by NCCL itself.
        return context.tensor or result.id != "pair.p2p"
    forced_off = context.tensor and context.policy.p2p == "off" and result.id == "pair.p2p"
    return forced_off and result.status is not Status.SKIPPED


def _variables(context: Context, result: CheckResult) -> dict[str, str]:
    hung_in_custom_only = result.id == "pair.functional" and any(
        pair.custom_all_reduce_only for pair in context.pairs
    )
    if hung_in_custom_only:
        return {}
    if result.id == "pair.functional" and result.observed.startswith("mismatch"):
        # The engine's own test of peer writes is off by default; with lying hardware it must run.
        return {**NO_P2P, "VLLM_SKIP_P2P_CHECK": "0"}
    return dict(NO_P2P)


def _suggested(context: Context, results: Sequence[CheckResult]) -> Kind | None:
    """Another plan that the faults at hand would let start, None when none is needed or fits."""
    failed = [result for result in results if result.status is Status.FAIL]
    if not failed or not context.parallel:
        return None
    wide = {"pair.p2p", "pair.functional", "pair.nvlink", "pcie.rate", "pcie.width_degraded"}
    if context.tensor and all(result.id in wide for result in failed):
        return "pp2"
    sick = {result.scope for result in failed}
    one_left = len(context.gpus) - sum(1 for gpu in context.gpus if f"gpu:{gpu.uuid}" in sick) >= 1
    return (
        "single"
        if one_left and all(scope.startswith(("gpu:", "pair:")) for scope in sick)
        else None
    )
