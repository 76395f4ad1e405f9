"""One fetch of the model that the local hub has, in this process or as a command."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.fetch.job import Job, fetch
from appliance.fetch.remote import HuggingFace

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "team/model"
LARGE, SMALL = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
KILL_AT = Path(__file__).parents[1] / "unit/appliance/kill_at.py"

Wanted = Callable[[Path], None]
"""Asserts that a directory holds what the hub has, whole."""


def run(target: Path, revision: str = COMMIT, stream: Any = None) -> dict[str, Any]:
    """Fetch into a directory and return the report."""
    job = Job("hub", REPOSITORY, revision, target)
    return fetch(job, HuggingFace(), stream or io.StringIO())


def words_of(target: Path, *others: str) -> tuple[str, ...]:
    """Return the command line of the same fetch, without the program."""
    return ("model", "fetch", REPOSITORY, str(target), "--revision", COMMIT, *others)


def cli(target: Path, *others: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        (sys.executable, "-m", "appliance", *words_of(target, *others)),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environ,
        timeout=120,
    )


def killed(at: int, target: Path) -> subprocess.CompletedProcess[str]:
    """Run the command and kill it at its event `at` on the directory; 0 lets it live."""
    command = (sys.executable, str(KILL_AT), str(at), str(target), *words_of(target))
    return subprocess.run(command, capture_output=True, text=True, check=False)
