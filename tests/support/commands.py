"""One run of the appliance's command in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from appliance.cli import main


@dataclass(frozen=True)
class Ended:
    """What one run of the command left."""

    code: int
    out: str
    err: str

    @property
    def codes(self) -> list[str]:
        """Codes of the faults, in order."""
        return [line[6:].split("]")[0] for line in self.err.splitlines() if line[:6] == "error["]


def run_command(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Ended:
    """Run one verb to its end."""
    capsys.readouterr()
    try:
        code = main([str(word) for word in words])
    except SystemExit as end:  # argparse's own way out
        code = int(end.code or 0)
    said = capsys.readouterr()
    return Ended(code, said.out, said.err)
