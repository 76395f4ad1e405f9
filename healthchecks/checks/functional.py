"""What copies and all-reduces between the GPUs really did; it overrules what the driver says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import HARD, SOFT, Context, Evidence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.facts import PairFacts
    from healthchecks.result import CheckResult, Severity

_WANTED = "data arrives unchanged, both ways, in time"
_BAD = {
    "mismatch": "data arrives changed or not at all although no call failed",
    "hang": "a copy between the GPUs does not end",
    "crash": "a copy between the GPUs kills its process",
    "error": "a copy between the GPUs is refused",
}
_HOST_REMEDY = (
    "on the host: turn ACS off on the bridges between the GPUs, or IOMMU translation"
    " (intel_iommu=off or iommu=pt); until then gate.p2p.policy: auto starts without P2P"
)
_CRASH_REMEDY = (
    "try in this order: NCCL_CUMEM_ENABLE=0, gate.p2p.policy: off, another driver; "
    "parallel.mode: pipeline or"
    " single starts without tensor parallelism"
)


def check(context: Context) -> Iterator[CheckResult]:
    """Judge every pair's copy, then its all-reduce."""
    for pair in context.pairs:
        yield _copy(context, pair)
        yield from _collective(context, pair)


def _severity(context: Context) -> Severity:
    return context.p2p_severity() if context.tensor else SOFT


def _copy(context: Context, pair: PairFacts) -> CheckResult:
    subject = context.on_pair("pair.functional", pair, _severity(context), "cuda")
    outcome = pair.functional
    if outcome in _BAD:
        if pair.custom_all_reduce_only and not context.tensor:
            return subject.skipped(
                "the fault is one of vLLM's own all-reduce, which a pipeline does not use"
            )
        detail = f" ({pair.functional_detail})" if pair.functional_detail else ""
        remedy, scope = (_HOST_REMEDY, "edit_config")
        return subject.fails(
            f"{outcome}{detail}", _WANTED, f"{_BAD[outcome]}{detail}", remedy=remedy, scope=scope
        )
    if outcome == "ok":
        rate = f", {pair.functional_gb_s:.1f} GB/s" if pair.functional_gb_s else ""
        return subject.passes(f"ok{rate}", _WANTED)
    return _not_run(context, pair)


def _not_run(context: Context, pair: PairFacts) -> CheckResult:
    subject = context.on_pair("pair.functional", pair, _severity(context), "cuda")
    if pair.functional == "no_access":
        return subject.skipped(
            "CUDA offers no peer access between the two, so there is nothing to test"
        )
    if context.policy.p2p == "off" or not context.policy.functional_test:
        return subject.skipped("turned off by gate.p2p")
    if context.evidence is not Evidence.LIVE:
        return subject.skipped("the record shows no copy between the GPUs")
    return subject.unknown(
        "not run", _WANTED, f"the copy could not be tried ({pair.functional_detail or 'no CUDA'})"
    )


def _collective(context: Context, pair: PairFacts) -> Iterator[CheckResult]:
    """A two-rank all-reduce: failing with P2P only is a pair fault, failing without it refuses."""
    if pair.collective is None and pair.collective_no_p2p is None:
        return
    wanted = "the sum of both ranks, in time"
    detail = f" ({pair.collective_detail})" if pair.collective_detail else ""
    if pair.collective_no_p2p in _BAD:
        observed = f"{pair.collective_no_p2p} without P2P{detail}"
        yield context.on_pair("pair.collective", pair, HARD, "cuda").fails(
            observed,
            wanted,
            f"NCCL fails between the two even without P2P: {observed}",
            remedy=_CRASH_REMEDY,
            scope="edit_config",
        )
    elif pair.collective in _BAD:
        yield context.on_pair("pair.collective", pair, _severity(context), "cuda").fails(
            f"{pair.collective}{detail}",
            wanted,
            f"NCCL with P2P fails between the two ({pair.collective}{detail}), without P2P "
            "it works",
            remedy=_HOST_REMEDY,
            scope="edit_config",
        )
    else:
        yield context.on_pair("pair.collective", pair, HARD, "cuda").passes("right sums", wanted)
