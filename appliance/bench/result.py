"""What one served layout gives, as it is stored, and several of them side by side."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FORMAT = 1
SLACK = 0.10
"""Two runs of one machine differ by some percent; this share less is worse."""

_RATES = {
    "prefill_rate": "prompt tokens/s",
    "decode_rate": "tokens/s, one alone",
    "decode_rate_together": "tokens/s, together",
}


@dataclass(frozen=True)
class Result:
    """Rates in tokens a second.

    Attributes:
        label: How it was served, such as `single` or `tensor`.
        model: Served name.
        prompt_tokens: Length of the prompts that were read.
        answer_tokens: Length of the answers that were written.
        at_once: Requests together.
        prefill_rate: Tokens of a prompt read a second, one request.
        decode_rate: Tokens written a second, one request.
        decode_rate_together: Tokens written a second over all requests together.
    """

    label: str
    model: str
    prompt_tokens: int
    answer_tokens: int
    at_once: int
    prefill_rate: float
    decode_rate: float
    decode_rate_together: float

    @property
    def load(self) -> tuple[str, int, int, int]:
        """What was asked; only results of the same can be compared."""
        return self.model, self.prompt_tokens, self.answer_tokens, self.at_once

    def to_json(self) -> str:
        """Return the stored form."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"


def load_result(path: Path) -> Result:
    """Read a stored result.

    Raises:
        ApplianceError: BENCH_INPUT, exit 2.
    """
    try:
        return _result(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__} {error}"
        raise unusable(str(path), "a result of this verb", reason) from None


def _result(stored: dict[str, Any]) -> Result:
    if stored.pop("format") != FORMAT:
        raise ValueError("another format")
    result = Result(**stored)
    if min(float(getattr(result, name)) for name in _RATES) <= 0.0:
        raise ValueError("a rate of 0")
    return result


def check_alike(results: Sequence[Result]) -> None:
    """Refuse results of other models or loads.

    Raises:
        ApplianceError: BENCH_INPUT, exit 2.
    """
    loads = {result.load for result in results}
    if len(loads) > 1:
        value = " and ".join(str(load) for load in sorted(loads))
        raise unusable("--against", "results of one model and one load", value)


def table(results: Sequence[Result]) -> str:
    """Return the results as aligned lines, and the best of each rate."""
    rows = [("", *_RATES.values())]
    rows += [(each.label, *(f"{getattr(each, name):.1f}" for name in _RATES)) for each in results]
    if len(results) > 1:
        best = [max(results, key=lambda each: getattr(each, name)).label for name in _RATES]
        rows.append(("best", *best))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "".join(
        "  ".join(
            f"{cell:<{width}}" if column == 0 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        + "\n"
        for row in rows
    )


def check_baseline(found: Result, baseline: Result) -> None:
    """Refuse rates that are worse than a stored result's by more than `SLACK`.

    Raises:
        ApplianceError: BENCH_REGRESSION, exit 60, with every rate that is.
    """
    faults: list[Fault] = []
    for name, text in _RATES.items():
        before, now = float(getattr(baseline, name)), float(getattr(found, name))
        if now < before * (1.0 - SLACK):
            what = f"at least {before * (1.0 - SLACK):.1f} {text}, as the baseline has {before:.1f}"
            fix = "see `appliance status` for safer settings and `appliance gate` for the hardware"
            faults.append(Fault("BENCH_REGRESSION", name, what, f"{now:.1f}", fix))
    if faults:
        raise ApplianceError(ExitCode.REGRESSION, *faults)


def unusable(where: str, what: str, value: str) -> ApplianceError:
    """Make the error of an input that cannot be used."""
    fix = "measure again with the same options"
    return ApplianceError(ExitCode.USAGE, Fault("BENCH_INPUT", where, what, value[:200], fix))
