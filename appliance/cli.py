"""The `appliance` command: finds the verb, runs it, turns faults into lines and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import signal
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.streams import is_output_lost, prepare, settle

if TYPE_CHECKING:
    from collections.abc import Sequence

VERBS = {
    "validate": "check the configuration file and the checkpoint it names",
    "schema": "print the JSON schema of the configuration file",
    "plan": "show what would be launched, why, and what every card's memory holds",
    "render": "print flags, environment and compose override of the plan",
    "gate": "judge the hardware for the plan",
    "serve": "gate, launch and supervise the engine",
    "probe": "answer an orchestrator: startup, live or ready",
    "status": "print what a running appliance is doing",
    "doctor": "name the cause behind an engine log",
    "bundle": "write one archive for whoever helps, without secrets",
    "drain": "stop taking requests and end when the last one is answered",
    "model": "inspect, verify, digest, fetch or import a checkpoint",
    "up": "start the containers that the configuration asks for, and wait until they serve",
    "quantize": "make an NVFP4 checkpoint of a dense one",
    "bench": "measure tokens a second of a served model, and compare layouts",
    "quality": "compare a served checkpoint with a reference",
    "convert": "rewrite a checkpoint in another form without changing a weight",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code of docs/operations.md."""
    words = list(sys.argv[1:] if argv is None else argv)
    prepare()
    code: int | None = None
    try:
        code = _run(words)
        sys.stdout.flush()  # here, where a full disk can still be told
    except BrokenPipeError:
        settle()  # the reader is gone, but what was done or not done stays so
        return 128 + signal.SIGPIPE if code is None else code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # noqa: BLE001 - the last boundary: whatever gets here is a bug of ours
        return _last_words(words, error)
    return code


def _last_words(words: list[str], error: Exception) -> int:
    """Tell what ended the command: a full disk behind stdout, or a bug of ours."""
    if is_output_lost(error):
        settle()
        reason = getattr(error, "strerror", None) or str(error)
        fix = "make room there, or send the output elsewhere"
        fault = Fault("DISK_FULL", "stdout", "the output must fit", reason, fix)
        return _report(ApplianceError(ExitCode.CONTAINER, fault), as_json=False)
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
    return _report(ApplianceError(ExitCode.BUG, _bug(words, error)), as_json="--json" in words)


def _run(words: list[str]) -> int:
    """Run the verb that the words begin with; faults become lines and their exit code."""
    verb = words[0] if words and words[0] in VERBS else None
    try:
        arguments = _parser(verb).parse_args(words)
    except _UsageError as error:
        if "--json" in words:
            _write_json(ApplianceError(ExitCode.USAGE, error.fault))
        raise
    module = importlib.import_module(f"appliance.commands.{verb}")
    try:
        return int(module.run(arguments))
    except ApplianceError as error:
        return _report(error, as_json=bool(getattr(arguments, "json", False)))


def _bug(words: list[str], error: Exception) -> Fault:
    return Fault(
        code="BUG",
        where=f"appliance {' '.join(words[:1])}".rstrip(),
        what="a fault the appliance does not know",
        value=f"{type(error).__name__}: {error}",
        fix="report it with the traceback above",
    )


class _UsageError(SystemExit):
    """The end of a command whose words were wrong; argparse has told it on stderr."""

    def __init__(self, prog: str, message: str) -> None:
        super().__init__(int(ExitCode.USAGE))
        what, fix = "words that the command takes", f"see {prog} --help"
        self.fault = Fault("USAGE", prog, what, message, fix)


class _Parser(argparse.ArgumentParser):
    """A parser that remembers what was wrong; those of nested verbs are of its class."""

    def error(self, message: str) -> NoReturn:
        """Tell what is wrong and end.

        Raises:
            SystemExit: Always, with exit code 2.
        """
        try:
            super().error(message)
        except SystemExit:
            raise _UsageError(self.prog, message) from None


def _parser(verb: str | None) -> argparse.ArgumentParser:
    """Build one verb's parser in full and the others as names, so that start-up stays short."""
    parser = _Parser(prog="appliance", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, text in VERBS.items():
        sub = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name == verb:
            importlib.import_module(f"appliance.commands.{name}").configure(sub)
    return parser


def _report(error: ApplianceError, *, as_json: bool) -> int:
    """Print every fault on stderr and, for machines, the same as JSON on stdout.

    The exit code stands, whether anybody can still read the faults or not.
    """
    with contextlib.suppress(OSError):
        sys.stderr.writelines(f"{fault}\n" for fault in error.faults)
    if as_json:
        _write_json(error)
    settle()
    return int(error.exit_code)


def _write_json(error: ApplianceError) -> None:
    faults = [_fault_json(fault) for fault in error.faults]
    report = json.dumps({"exit_code": int(error.exit_code), "faults": faults})
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{report}\n")


def _fault_json(fault: Fault) -> dict[str, str]:
    return {
        "code": fault.code,
        "where": fault.where,
        "what": fault.what,
        "value": fault.value,
        "fix": fault.fix,
    }
