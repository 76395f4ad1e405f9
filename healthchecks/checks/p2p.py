"""What the driver says of peer access between the plan's GPUs, both ways, read and write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.context import HARD, INFO, SOFT, Context, Evidence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.facts import PairFacts
    from healthchecks.result import CheckResult

_NONE_NEEDED = "none needed; gate.p2p.policy: require refuses instead"


def check(context: Context) -> Iterator[CheckResult]:
    """Judge every pair; a single-GPU plan has none."""
    for pair in context.pairs:
        yield _access(context, pair) if context.tensor else _symmetry(context, pair)
        yield from _custom_all_reduce(context, pair)


def directions(pair: PairFacts) -> dict[str, str]:
    """Return what is known of each direction and kind of access."""
    a, b = pair.a, pair.b
    known = {
        f"read {a}->{b}": pair.read_ab,
        f"read {b}->{a}": pair.read_ba,
        f"write {a}->{b}": pair.write_ab,
        f"write {b}->{a}": pair.write_ba,
    }
    return {name: status for name, status in known.items() if status is not None}


def _access(context: Context, pair: PairFacts) -> CheckResult:
    severity = context.p2p_severity()
    subject = context.on_pair("pair.p2p", pair, severity)
    known, wanted = directions(pair), "OK for read and write, both ways"
    bad = {name: status for name, status in known.items() if status != "OK"}
    if pair.functional == "ok" and not bad:
        return subject.passes("proven by copy", wanted)
    if bad:
        observed = ", ".join(f"{name} {status}" for name, status in bad.items())
        return subject.fails(
            observed,
            wanted,
            f"no peer access ({observed}); data goes through host memory"
            if severity is not HARD
            else f"no peer access ({observed})",
            remedy=_refusal_remedy() if severity is HARD else _NONE_NEEDED,
            scope="edit_config" if severity is HARD else "none",
        )
    # A recorded state may show `topo -p2p r` alone; a live start needs all four answers.
    needed = 2 if context.evidence is Evidence.LENIENT else 4
    if len(known) < needed:
        return _unproven(context, pair)
    return subject.passes("OK", wanted)


def _unproven(context: Context, pair: PairFacts) -> CheckResult:
    """Peer access that nothing showed: `require` cannot go on, `auto` does without it."""
    severity, wanted = context.p2p_severity(), "OK for read and write, both ways"
    subject = context.on_pair("pair.p2p", pair, severity)
    if severity is HARD:
        return subject.unknown(
            "not shown", wanted, "peer access is not proven", remedy=_refusal_remedy()
        )
    return subject.fails(
        "not shown",
        wanted,
        "peer access is not proven; data goes through host memory",
        remedy=_NONE_NEEDED,
    )


def _refusal_remedy() -> str:
    return "set gate.p2p.policy: auto, or turn ACS and IOMMU translation off on the host"


def _symmetry(context: Context, pair: PairFacts) -> CheckResult:
    """A pipeline needs no peer access; one that works one way only is a fault all the same."""
    subject = context.on_pair("pair.p2p", pair, SOFT)
    known = directions(pair)
    if not known:
        if context.evidence is Evidence.LIVE:
            return subject.missing("read_ab", "the same both ways")
        return subject.skipped("peer access is not shown; a pipeline does without it")
    if len(set(known.values())) > 1:
        observed = ", ".join(f"{name} {status}" for name, status in known.items())
        return subject.fails(observed, "the same both ways", f"peer access differs: {observed}")
    return subject.passes(next(iter(known.values())), "the same both ways")


def _custom_all_reduce(context: Context, pair: PairFacts) -> Iterator[CheckResult]:
    if not context.tensor or not context.plan.custom_all_reduce:
        return
    subject = context.on_pair("pair.custom_all_reduce", pair, HARD, "config")
    wanted = "NVLink between the GPUs"
    if pair.nvlink_lanes:
        yield context.on_pair("pair.custom_all_reduce", pair, INFO, "config").passes(
            "NVLink", wanted
        )
        return
    yield subject.fails(
        "no NVLink between the GPUs",
        wanted,
        "execution.custom_all_reduce is on, which is known to spin for ever on two V100 "
        "without NVLink",
        remedy="set execution.custom_all_reduce: auto",
        scope="edit_config",
    )
