"""What two measurements say about each other, and whether that got worse since a baseline."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.quality.measurement import Measurement, unusable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FLOOR = 1e-12


@dataclass(frozen=True)
class Comparison:
    """A candidate (NVFP4) held against a reference (FP16).

    Attributes:
        reference: Name of the reference.
        candidate: Name of the candidate.
        inputs: What was asked of both.
        tokens: Predicted tokens of the text.
        perplexity: Of the candidate; lower is better.
        perplexity_reference: Of the reference.
        top1_agreement: Share of positions where both find the same token most probable.
        kl_mean: Mean Kullback-Leibler divergence of the candidate from the reference, in nats, over
            the tokens that both name and one class for all others: a lower bound of the true one.
        kl_p99: Its 99th percentile over positions.
        answers_equal: Share of bundled prompts with the same greedy continuation.
        answers_prefix: Mean share of a continuation, in letters, before the first difference.
        copied: Share of numbers that the candidate repeats.
        copied_reference: The same of the reference.
        solved: Share of sums that the candidate gets right.
        solved_reference: The same of the reference.
    """

    reference: str
    candidate: str
    inputs: Mapping[str, Any]
    tokens: int
    perplexity: float
    perplexity_reference: float
    top1_agreement: float
    kl_mean: float
    kl_p99: float
    answers_equal: float
    answers_prefix: float
    copied: float
    copied_reference: float
    solved: float
    solved_reference: float

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {"format": 1, **asdict(self)}


def compare(reference: Measurement, candidate: Measurement) -> Comparison:
    """Compare two measurements of the same inputs.

    Raises:
        ApplianceError: QUALITY_INPUT, exit 2, if they were not asked the same, or see the text as
            other tokens.
    """
    if dict(reference.inputs) != dict(candidate.inputs):
        value = f"{dict(candidate.inputs)} and {dict(reference.inputs)}"
        what = "two measurements of the same text and options"
        fix = "measure the reference again with the same text, --letters and --pieces"
        raise unusable(candidate.model, what, value, fix)
    if [w.tokens for w in reference.windows] != [w.tokens for w in candidate.windows]:
        what = "a reference with the same tokenizer"
        value, fix = (
            f"other tokens than {reference.model}",
            "compare with the same model unquantized",
        )
        raise unusable(candidate.model, what, value, fix)
    divergences = divergences_of(reference, candidate)
    agreed = [one[0][0] == two[0][0] for one, two in _tops(reference, candidate)]
    pairs = list(zip(reference.answers, candidate.answers, strict=True))
    return Comparison(
        reference=reference.model,
        candidate=candidate.model,
        inputs=dict(candidate.inputs),
        tokens=candidate.tokens,
        perplexity=candidate.perplexity,
        perplexity_reference=reference.perplexity,
        top1_agreement=_share(agreed),
        kl_mean=sum(divergences) / len(divergences),
        kl_p99=_percentile(divergences, 0.99),
        answers_equal=_share([one == two for one, two in pairs]),
        answers_prefix=sum(_common(one, two) for one, two in pairs) / max(len(pairs), 1),
        copied=_share(candidate.copied),
        copied_reference=_share(reference.copied),
        solved=_share(candidate.solved),
        solved_reference=_share(reference.solved),
    )


def divergences_of(reference: Measurement, candidate: Measurement) -> list[float]:
    """Divergence at every position, in nats; see `Comparison.kl_mean`."""
    return [divergence(one, two) for one, two in _tops(reference, candidate)]


def divergence(
    reference: Sequence[tuple[int, float]], candidate: Sequence[tuple[int, float]]
) -> float:
    """Kullback-Leibler divergence of two distributions of which only the top is known.

    Tokens that one of them does not name fall into one class with all others. Merging classes never
    raises a divergence, so this is a lower bound.

    Args:
        reference: Token ids and natural logarithms of their probability.
        candidate: The same.
    """
    ours = dict(candidate)
    shared = [(math.exp(value), math.exp(ours[key])) for key, value in reference if key in ours]
    rest = (1.0 - sum(p for p, _ in shared), 1.0 - sum(q for _, q in shared))
    total = 0.0
    for p, q in (*shared, rest):
        if p > _FLOOR:
            total += p * math.log(p / max(q, _FLOOR))
    return max(total, 0.0)


@dataclass(frozen=True)
class _Rule:
    """One figure that must not get worse by more than `slack`."""

    key: str
    slack: float
    relative: bool = False
    lower_is_better: bool = False

    def limit(self, baseline: float) -> float:
        """The worst value that is still accepted."""
        slack = self.slack * (baseline if self.relative else 1.0)
        return baseline + slack if self.lower_is_better else baseline - slack


_RULES = (
    _Rule("perplexity", 0.02, relative=True, lower_is_better=True),
    _Rule("kl_mean", 0.005, lower_is_better=True),
    _Rule("top1_agreement", 0.01),
    _Rule("copied", 0.10),
    _Rule("solved", 0.10),
)


def check_baseline(found: Comparison, baseline: Mapping[str, Any], where: str) -> None:
    """Refuse a candidate that is worse than a stored comparison.

    Args:
        found: The comparison of today.
        baseline: A stored one.
        where: Its file, for messages.

    Raises:
        ApplianceError: QUALITY_REGRESSION, exit 60, with every figure that is worse; QUALITY_INPUT,
            exit 2, if the baseline is of other inputs.
    """
    if baseline.get("inputs") != dict(found.inputs):
        fix = "use the text and options of the baseline, or store a new one without --baseline"
        what = "a baseline of the same text and options"
        raise unusable(where, what, str(baseline.get("inputs")), fix)
    faults: list[Fault] = []
    now = found.to_json()
    for rule in _RULES:
        before = baseline.get(rule.key)
        if not isinstance(before, (int, float)):
            fix = "store a new baseline: run without --baseline"
            raise unusable(where, f"a number for {rule.key}", repr(before), fix)
        limit, value = rule.limit(float(before)), float(now[rule.key])
        worse = value > limit if rule.lower_is_better else value < limit
        if worse or math.isnan(value):
            word = "most" if rule.lower_is_better else "least"
            what = f"at {word} {limit:.5g}, as the baseline has {float(before):.5g}"
            fix = "serve the checkpoint that the baseline is of, or store a new baseline"
            faults.append(Fault("QUALITY_REGRESSION", rule.key, what, f"{value:.5g}", fix))
    if faults:
        raise ApplianceError(ExitCode.REGRESSION, *faults)


_SAME = {"perplexity": 0.01, "kl_mean": 0.005, "top1_agreement": 0.98}
"""What rounding alone may do: a share of the perplexity, nats, and a share of positions."""


def check_same(found: Comparison) -> None:
    """Refuse two ways of computing one checkpoint that do not agree.

    Rounding moves log-probabilities by thousandths; a kernel that is wrong, a cut that is wrong, or
    copies between GPUs that arrive changed move them by far more. Greedy answers are not judged:
    one tie that rounding breaks the other way changes the rest of an answer.

    Args:
        found: The comparison of the two.

    Raises:
        ApplianceError: QUALITY_DIVERGES, exit 60, with every figure that is beyond rounding.
    """
    change = abs(found.perplexity / found.perplexity_reference - 1.0)
    figures = (
        ("perplexity", f"a change of at most {_SAME['perplexity']:.0%}", change,
         change <= _SAME["perplexity"]),
        ("kl_mean", f"at most {_SAME['kl_mean']} nats", found.kl_mean,
         found.kl_mean <= _SAME["kl_mean"]),
        ("top1_agreement", f"at least {_SAME['top1_agreement']:.0%} of positions",
         found.top1_agreement, found.top1_agreement >= _SAME["top1_agreement"]),
    )  # fmt: skip
    fix = "run `appliance gate`, which copies between the GPUs, and compare again on one GPU"
    faults = [
        Fault("QUALITY_DIVERGES", key, what, f"{value:.5g}", fix)
        for key, what, value, is_same in figures
        if not is_same
    ]
    if faults:
        raise ApplianceError(ExitCode.REGRESSION, *faults)


def _tops(
    reference: Measurement, candidate: Measurement
) -> list[tuple[tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]]:
    return [
        pair
        for one, two in zip(reference.windows, candidate.windows, strict=True)
        for pair in zip(one.top, two.top, strict=True)
    ]


def _share(found: Sequence[bool]) -> float:
    return sum(found) / len(found) if found else 0.0


def _common(one: str, two: str) -> float:
    longest = max(len(one), len(two))
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
    return same / longest if longest else 1.0


def _percentile(values: Sequence[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, math.ceil(share * len(ranked)) - 1)]


def cumulated(values: Sequence[float], points: int) -> list[tuple[float, float]]:
    """Share of values (percent) and the value that this share stays under, for a chart."""
    ranked = sorted(values)
    steps = [round(number * (len(ranked) - 1) / points) for number in range(points + 1)]
    kept = [steps[0], *(two for one, two in pairwise(steps) if two > one)]
    return [(100.0 * at / max(len(ranked) - 1, 1), ranked[at]) for at in kept]
