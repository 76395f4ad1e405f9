"""`appliance quality --url URL --text FILE --out DIR`: what a served checkpoint has lost."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.commands._packages import require_packages
from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    from appliance.quality.measurement import Measurement

HELP = "compare a served checkpoint with a reference: perplexity, agreement, divergence, tasks"

_LETTERS, _PIECES, _AT_ONCE = 1200, 32, 4
_LARGEST = 1_000_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("--url", required=True, help="server of the candidate, http://host:port")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text for perplexity")
    parser.add_argument("--out", type=Path, required=True, help="directory for the results")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--reference", type=Path, help="measurement.json of the reference")
    other.add_argument("--reference-url", help="server of the reference, if it runs now")
    parser.add_argument("--baseline", type=Path, help="quality.json that must not get worse")
    parser.add_argument(
        "--same-model",
        action="store_true",
        help="the reference is this checkpoint computed another way: exit 60 if they diverge",
    )
    parser.add_argument("--model", default=None, help="served name (default: the first listed)")
    parser.add_argument("--api-key-file", type=Path, default=None, help="file with one API key")
    for name, default, text in (
        ("--letters", _LETTERS, "letters of a piece of text"),
        ("--pieces", _PIECES, "most pieces of text"),
        ("--at-once", _AT_ONCE, "requests at the same time"),
    ):
        parser.add_argument(name, type=_count, default=default, help=f"{text} (default {default})")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, compare, judge."""
    require_packages("appliance quality", ("numpy", "httpx"))
    judged = arguments.baseline or arguments.same_model
    if judged and not (arguments.reference or arguments.reference_url):
        what = f"--{'baseline' if arguments.baseline else 'same-model'} goes with a reference"
        fix = "add --reference or --reference-url"
        fault = Fault("QUALITY_INPUT", "appliance quality", what, "no reference", fix)
        raise ApplianceError(ExitCode.USAGE, fault)
    from appliance.quality import job, report  # noqa: PLC0415 - numpy, this verb only
    from appliance.quality.compare import check_baseline, check_same, compare  # noqa: PLC0415 - as above
    from appliance.quality.measurement import load_measurement  # noqa: PLC0415 - as above

    stored = load_measurement(arguments.reference) if arguments.reference else None
    baseline = job.load_baseline(arguments.baseline) if arguments.baseline else None
    candidate = _measure(arguments, arguments.url)
    reference = _measure(arguments, arguments.reference_url) if arguments.reference_url else stored
    job.save(arguments.out, job.MEASUREMENT, candidate.to_json().encode())
    if reference is None:
        _say(arguments, f"perplexity {candidate.perplexity:.3f} over {candidate.tokens} tokens", {})
        return ExitCode.OK
    found = compare(reference, candidate)
    job.save(arguments.out, job.COMPARISON, json.dumps(found.to_json(), indent=2).encode())
    plot = report.picture(reference, candidate)
    if plot is not None:
        job.save(arguments.out, job.PLOT, plot)
    if arguments.same_model:
        check_same(found)
    if baseline is not None:
        check_baseline(found, baseline, str(arguments.baseline))
    _say(arguments, report.table(found).rstrip(), found.to_json())
    return ExitCode.OK


def _measure(arguments: argparse.Namespace, url: str) -> Measurement:
    from appliance.quality import job, measure  # noqa: PLC0415 - numpy, this verb only

    text = measure.read_text(arguments.text, letters=arguments.letters, pieces=arguments.pieces)
    key = job.read_key(arguments.api_key_file) if arguments.api_key_file else None
    served = measure.Served(url, model=arguments.model, key=key)
    try:
        return measure.measure(served, text, at_once=arguments.at_once, advance=_advance)
    finally:
        served.close()


def _advance(done: int, total: int) -> None:
    if done % 10 == 0 or done == total:
        sys.stderr.write(f"INFO quality.progress requests={done}/{total}\n")
        sys.stderr.flush()


def _say(arguments: argparse.Namespace, text: str, values: dict[str, Any]) -> None:
    shown = json.dumps(values) if arguments.json else text
    sys.stdout.write(f"{shown}\n")


def _count(text: str) -> int:
    if not (text.isdecimal() and len(text) < 8 and 1 <= int(text) <= _LARGEST):  # noqa: PLR2004
        raise argparse.ArgumentTypeError(f"an integer from 1 to {_LARGEST}, got {text!r}")
    return int(text)
