"""Speculation by layers for multi-token prediction that a checkpoint does not have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "engine" / "speculation.py"


@pytest.mark.engine
def test_engine_that_speculates_without_the_layers_is_refused(models: Path) -> None:
    words = [sys.executable, str(SCRIPT), str(models / "ct" / "model")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)

    told = [line for line in done.stdout.splitlines() if line.startswith(("mtp: ", "ngram: "))]

    refused, taken = told
    assert refused.startswith("mtp: error[E_MTP_ABSENT] speculative-config mtp: ")
    assert taken == "ngram: taken"
