"""`appliance bench --url URL`: tokens a second of a served model, beside those of other layouts."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

from appliance.commands._packages import require_packages
from appliance.errors import ApplianceError, ExitCode, Fault

HELP = "measure tokens a second of a served model, and compare layouts"
_LARGEST = 100_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--url", type=_url, required=True, help="server, http://host:port")
    parser.add_argument("--label", default="now", help="name of this layout (default: now)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result to FILE")
    parser.add_argument(
        "--against",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="results of other layouts, to be put beside this one",
    )
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="must not get worse: exit 60")
    parser.add_argument("--api-key-file", type=Path, help="file with one API key")
    for name, default, text in (
        ("--prompt-tokens", 1024, "length of the prompts whose reading is timed"),
        ("--answer-tokens", 128, "length of the answers whose writing is timed"),
        ("--at-once", 8, "requests together"),
    ):
        parser.add_argument(name, type=_count, default=default, help=f"{text} (default {default})")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, compare, print and return 0.

    Raises:
        ApplianceError: Exit 2, 12 or 41, or 60 if it is worse than the baseline.
    """
    require_packages("appliance bench", ("httpx",))
    from appliance.bench import result, served  # noqa: PLC0415 - httpx, this verb only

    others = [result.load_result(path) for path in arguments.against]
    baseline = result.load_result(arguments.baseline) if arguments.baseline else None
    key = _key(arguments.api_key_file)
    load = served.Load(arguments.prompt_tokens, arguments.answer_tokens, arguments.at_once)
    server = served.Server(arguments.url, key=key)
    try:
        found = served.measure(server, arguments.label, load)
    finally:
        server.close()
    results = [*others, found]
    result.check_alike([*results, *([baseline] if baseline else [])])
    if arguments.out is not None:
        _write(arguments.out, found.to_json())
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(each) for each in results]) + "\n")
    else:
        sys.stdout.write(result.table(results))
    if baseline is not None:
        result.check_baseline(found, baseline)
    return ExitCode.OK


def _key(path: Path | None) -> str | None:
    """Return the first line of the key file; the key is never part of a message."""
    if path is None:
        return None
    from appliance.bench.result import unusable  # noqa: PLC0415 - as above

    try:
        key = path.read_text(encoding="ascii").split("\n", 1)[0].strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no ASCII text"
        raise unusable(str(path), "a file with one API key", reason) from None
    if not key:
        raise unusable(str(path), "a file with one API key", "an empty first line")
    return key


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        what, fix = "a file that can be written", "name another by --out"
        value = error.strerror or type(error).__name__
        fault = Fault("OUTPUT_UNWRITABLE", str(path), what, value, fix)
        raise ApplianceError(ExitCode.CONTAINER, fault) from None


def _url(text: str) -> str:
    """Return an address whose scheme and host are stated; no server is asked without them."""
    try:
        parts = urlsplit(text)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        whole = False
    if not whole:
        raise argparse.ArgumentTypeError(f"must be http://host:port, got {text!r}")
    return text


def _count(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= _LARGEST):
        raise argparse.ArgumentTypeError(f"must be from 1 to {_LARGEST}, got {text!r}")
    return int(text)
