"""The patches to vLLM that touch what CPU and GPU engines share, in the CPU engine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PATCHES = HERE.parents[1] / "kernels/patches/vllm/0.27.1"
FOR_GPUS = ("0001", "0002")
"""What stands where the CUDA extension would be."""

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def patched(folder: Path) -> Path:
    """Lay the engine's package below a folder, as links, and the patched files as copies."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    shutil.copytree(package, folder / "vllm", copy_function=os.symlink)
    for name in (PATCHES / "series").read_text().split():
        if name.startswith(FOR_GPUS):
            continue
        text = (PATCHES / name).read_text()
        for file in re.findall(r"^\+\+\+ b/(\S+)", text, re.MULTILINE):
            target = folder / file
            if target.is_symlink():
                original = target.resolve()
                target.unlink()
                shutil.copy(original, target)
        words = ("patch", "--strip=1", "--fuzz=0", "--quiet")
        subprocess.run(words, input=text, text=True, check=True, cwd=folder)
    return folder


def asked(model: Path, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """What the engine says of two prompts."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(HERE / "engine/sampling.py"), str(model), str(folder / "result.json")],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return dict(json.loads((folder / "result.json").read_text()))


def test_logprobs_of_prompts_are_the_same_in_bounded_rows_and_all_sampling_runs_before_serving(
    models: Path, tmp_path: Path, engine_environment: dict[str, str]
) -> None:
    model = models / "ct" / "model"
    before_installed = {"PYTHONPATH": str(patched(tmp_path / "packages"))}

    plain = asked(model, tmp_path / "plain", engine_environment)
    ours = asked(model, tmp_path / "ours", engine_environment | before_installed)

    assert plain["rows"] > 64
    assert ours["rows"] == 64
    assert [len(prompt) for prompt in ours["logprobs"]] == [229, 8]
    for right, found in zip(plain["logprobs"], ours["logprobs"], strict=True):
        for place, (wanted, given) in enumerate(zip(right, found, strict=True)):
            assert given == pytest.approx(wanted, abs=1e-4), place
    both = {"top_k": True, "top_p": True, "penalties": False}
    extra = [both | {"top_k": False}, both | {"top_p": False}, both | {"penalties": True}]
    assert ours["sampled"] == plain["sampled"] + extra
