"""The gate on a real machine: facts agree with nvidia-smi, the pair test holds and finds a lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("run_gate.py")


@pytest.mark.gpu
@pytest.mark.slow
def test_gate_on_this_machine_agrees_with_nvidia_smi(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, "OUT": str(tmp_path)},
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "gate.json").read_text())["wrong"] == []
