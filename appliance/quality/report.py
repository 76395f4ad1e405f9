"""A comparison for people: a table and a picture."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from appliance.chart import Line, Panel, draw
from appliance.quality.compare import Comparison, cumulated, divergences_of

if TYPE_CHECKING:
    from appliance.quality.measurement import Measurement

_POINTS = 60


def table(found: Comparison) -> str:
    """Return aligned lines: figure, reference, candidate."""
    rows = [
        ("", "reference", "candidate"),
        ("model", found.reference, found.candidate),
        (
            f"perplexity, {found.tokens} tokens",
            f"{found.perplexity_reference:.3f}",
            f"{found.perplexity:.3f}",
        ),
        ("most probable token agrees", "", f"{found.top1_agreement:.1%}"),
        ("KL divergence, mean (nats)", "", f"{found.kl_mean:.4f}"),
        ("KL divergence, 99 % below", "", f"{found.kl_p99:.4f}"),
        ("30 answers equal", "", f"{found.answers_equal:.0%}"),
        ("30 answers, common start", "", f"{found.answers_prefix:.0%}"),
        ("numbers copied", f"{found.copied_reference:.0%}", f"{found.copied:.0%}"),
        ("sums right", f"{found.solved_reference:.0%}", f"{found.solved:.0%}"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = (
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}".rstrip()
        for row in rows
    )
    return "\n".join(lines) + "\n"


def picture(reference: Measurement, candidate: Measurement) -> bytes | None:
    """Return a PNG: perplexity by piece of text and divergence by share of positions."""
    pieces = tuple(
        Line(
            name,
            tuple(
                (number, math.exp(-sum(window.logprobs) / len(window.logprobs)))
                for number, window in enumerate(found.windows, 1)
            ),
        )
        for name, found in (("reference", reference), ("candidate", candidate))
    )
    shares = tuple(cumulated(divergences_of(reference, candidate), _POINTS))
    # The last percents are a hundred times the median and would hide it.
    most = tuple(itertools.takewhile(lambda point: point[0] <= 95.0, shares))  # noqa: PLR2004
    return draw(
        [
            Panel("Perplexity by piece", "piece of the text", "lower is better", pieces),
            Panel(
                "Divergence of the candidate",
                "share of positions below, percent (to 95)",
                "nats",
                (Line("KL divergence", most),),
            ),
        ]
    )
