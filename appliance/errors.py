"""The one exception root of the package, and the exit codes every command keeps to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

_LONGEST_PART = 1000  # letters; a path may have four times as many, nobody reads them


class ExitCode(IntEnum):
    """Exit codes of the command line and of the container; the table is in docs/operations.md."""

    OK = 0
    USAGE = 2
    CONFIG = 10
    NO_GPU = 11
    CONTAINER = 12
    GATE_FAILED = 20
    GATE_UNKNOWN = 21
    CHECKPOINT_UNSUPPORTED = 30
    CHECKPOINT_CORRUPT = 31
    DOES_NOT_FIT = 32
    ENGINE_START = 40
    ENGINE_DIED = 41
    GPU_FAULT = 42
    STALLED = 43
    DRAIN_TIMEOUT = 50
    REGRESSION = 60
    BUG = 70


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, in the parts that make its one-line message.

    Attributes:
        code: Stable upper-case name; each has a heading in docs/operations.md.
        where: `file:line key`, GPU index and bus id, tensor name, or path.
        what: What was expected or what went wrong, with units.
        value: What was found instead.
        fix: What the reader can do now.
    """

    code: str
    where: str
    what: str
    value: str
    fix: str

    def __str__(self) -> str:
        """Return the line `error[CODE] WHERE: WHAT, got VALUE; FIX.`."""
        where, what, value, fix = map(_one_line, (self.where, self.what, self.value, self.fix))
        return f"error[{self.code}] {where}: {what}, got {value}; {fix}."


def _one_line(part: str) -> str:
    """Return a part as one printable line; names in a hostile file hold line ends and escapes."""
    if len(part) > _LONGEST_PART:
        part = f"{part[:_LONGEST_PART]}..."
    return part if part.isprintable() else "".join(map(_printable, part))


def _printable(letter: str) -> str:
    return letter if letter.isprintable() else ascii(letter)[1:-1]


class ApplianceError(Exception):
    """Stops a command: one or more faults that share an exit code."""

    def __init__(self, exit_code: ExitCode, *faults: Fault) -> None:
        """Keep the faults; the message is one line each."""
        super().__init__("\n".join(str(fault) for fault in faults))
        self.exit_code = exit_code
        self.faults = faults
