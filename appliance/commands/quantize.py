"""`appliance quantize SRC DST`: make an NVFP4 checkpoint of a dense one."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from appliance.commands._packages import require_packages
from appliance.errors import ApplianceError, ExitCode, Fault

HELP = "make an NVFP4 checkpoint of a dense one"

_MOST_THREADS = 1024
_MODES = ("fast", "rtn", "calibrated", "quasar-g128")
_TOKENS = 32768


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("source", type=Path, metavar="SRC", help="directory of the dense model")
    parser.add_argument("target", type=Path, metavar="DST", help="directory to make")
    parser.add_argument(
        "--mode",
        choices=_MODES,
        default="fast",
        help="fast: the best of 17 block scales (default); rtn: the scale nearest to amax / 6;"
        " calibrated: GPTQ by the activations of a text; quasar-g128: QUASAR-ST 1, groups of 128",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        default=None,
        metavar="TEXT",
        help="text file for --mode calibrated, like what the model will read and write",
    )
    parser.add_argument(
        "--calibration-tokens",
        type=_tokens,
        default=_TOKENS,
        metavar="N",
        help=f"most tokens of it to run, every fifth window held out (default: {_TOKENS})",
    )
    parser.add_argument(
        "--threads",
        type=_positive_int,
        default=None,
        help="threads of the encoder (default: the CPUs of this process)",
    )
    parser.add_argument(
        "--error-limit",
        type=_positive_float,
        default=None,
        help="largest relative squared error of a matrix ("
        "default: 8e-3 fast, 9.5e-3 rtn,"
        " 6e-2 calibrated, 1.8e-2 quasar-g128)",
    )
    parser.add_argument(
        "--allow-not-finite",
        action="store_true",
        help="copy NaN and infinite values of tensors that stay dense",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Quantize and print one summary line."""
    calibrated = arguments.mode == "calibrated"
    if calibrated != (arguments.calibration is not None):
        what = "--calibration TEXT goes with --mode calibrated"
        value = "no text" if calibrated else f"--mode {arguments.mode}"
        fix = "give both or neither"
        fault = Fault("QUANT_CALIBRATION", "appliance quantize", what, value, fix)
        raise ApplianceError(ExitCode.USAGE, fault)
    require_packages(
        "appliance quantize", ("numpy", "torch", "transformers") if calibrated else ("numpy",)
    )
    from appliance.quantize.job import Job, quantize  # noqa: PLC0415 - numpy, this verb only
    from appliance.quantize.settings import Calibration, settings_of  # noqa: PLC0415 - numpy, this verb only

    threads = arguments.threads or len(os.sched_getaffinity(0))
    settings = settings_of(
        arguments.mode,
        threads=threads,
        error_limit=arguments.error_limit,
        calibration=Calibration(arguments.calibration, arguments.calibration_tokens)
        if calibrated
        else None,
        allow_not_finite=arguments.allow_not_finite,
    )
    begun = time.monotonic()
    report = quantize(Job(arguments.source, arguments.target, settings), sys.stderr)
    if arguments.json:
        sys.stdout.write(json.dumps(report) + "\n")
    elif report["already_there"]:
        sys.stdout.write(
            f"{arguments.target} is there already, made by the same job: mode {report['mode']},"
            f" relative MSE {report['relative_mse']:.2e}; nothing was written\n"
        )
    else:
        sys.stdout.write(
            f"quantized {report['weights'] / 1e6:.1f} M weights in {len(report['tensors'])}"
            f" matrices to {arguments.target}: mode {report['mode']}, relative MSE"
            f" {report['relative_mse']:.2e},{_gain(report)}"
            f" {report['weights_per_s'] / 1e6:.1f} M weights/s, {time.monotonic() - begun:.1f} s\n"
        )
    return ExitCode.OK


def _gain(report: dict[str, Any]) -> str:
    if "below_rtn" not in report:
        return ""
    return (
        f" held-out output error {report['output_error']:.2e}"
        f" ({report['below_rtn']:.0%} below rtn's {report['output_error_rtn']:.2e}),"
    )


def _tokens(text: str) -> int:
    fewest, most = 4096, 1 << 24
    if not (text.isdecimal() and len(text) < 10 and fewest <= int(text) <= most):  # noqa: PLR2004
        raise argparse.ArgumentTypeError(f"an integer from {fewest} to {most}, got {text!r}")
    return int(text)


def _positive_int(text: str) -> int:
    if not (text.isdecimal() and len(text) < _MOST_THREADS and 1 <= int(text) <= _MOST_THREADS):
        raise argparse.ArgumentTypeError(f"an integer from 1 to {_MOST_THREADS}, got {text!r}")
    return int(text)


def _positive_float(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.0 < float(text) < 1.0:
            return float(text)
    raise argparse.ArgumentTypeError(f"a number between 0 and 1, got {text!r}")
