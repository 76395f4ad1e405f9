"""A checkpoint that cannot be trusted ends the engine with the code, the tensor and the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.engine

Tensors = dict[str, np.ndarray]
Config = dict[str, Any]
Edit = Callable[[Config, Tensors], None]

FP8 = ml_dtypes.float8_e4m3fn
K_PROJ = "model.layers.1.self_attn.k_proj"
EXPERT = "model.layers.1.mlp.experts.5.up_proj"
NORM = "model.norm.weight"
ROUTER = "model.layers.1.mlp.gate.weight"


def set_scale(module: str, row: int, block: int, code: int) -> Edit:
    """Write one E4M3 code among the block scales of a module."""

    def edit(_: Config, tensors: Tensors) -> None:
        scales = tensors[f"{module}.weight_scale"].copy()
        scales.view(np.uint8)[row, block] = code
        tensors[f"{module}.weight_scale"] = scales

    return edit


def set_global(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """Change one global scale."""

    def edit(_: Config, tensors: Tensors) -> None:
        tensors[name] = change(tensors[name]).astype(np.float32)

    return edit


def set_weight(name: str, value: float, kind: type = np.float32) -> Edit:
    """Store a tensor in another type, with one value changed."""

    def edit(_: Config, tensors: Tensors) -> None:
        tensors[name] = tensors[name].astype(kind)
        tensors[name].reshape(len(tensors[name]), -1)[2, 0] = value

    return edit


def flush(name: str) -> Edit:
    """Make a quarter of a vector smaller than FP16 can hold."""

    def edit(_: Config, tensors: Tensors) -> None:
        tensors[name][: len(tensors[name]) // 4] = 1e-9

    return edit


def without(name: str) -> Edit:
    """Leave one tensor out."""

    def edit(_: Config, tensors: Tensors) -> None:
        del tensors[name]

    return edit


def exclude(*patterns: str) -> Edit:
    """Add to the exclude list of the config."""

    def edit(config: Config, _: Tensors) -> None:
        config["quantization_config"]["ignore"] += patterns

    return edit


def dense_part(config: Config, tensors: Tensors) -> None:
    """Store one part of a fused matrix dense, and say so."""
    for suffix in ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"):
        del tensors[f"{K_PROJ}.{suffix}"]
    tensors[f"{K_PROJ}.weight"] = np.zeros((128, 256), ml_dtypes.bfloat16)
    config["quantization_config"]["ignore"].append(K_PROJ)


def dense_unsaid(config: Config, tensors: Tensors) -> None:
    """Store one part dense without saying so."""
    dense_part(config, tensors)
    config["quantization_config"]["ignore"].remove(K_PROJ)


CASES: dict[str, tuple[str, Edit, tuple[str, ...]]] = {
    "nan": (
        "ct",
        set_scale(K_PROJ, 7, 3, 0x7F),
        ("E_SCALE_NAN", f"{K_PROJ}.weight_scale", "row 7, block 3"),
    ),
    "negative": (
        "ct",
        set_scale(K_PROJ, 127, 15, 0x81),
        ("E_SCALE_NEGATIVE", f"{K_PROJ}.weight_scale", "row 127, block 15"),
    ),
    "divides": (
        "ct",
        set_global(f"{K_PROJ}.weight_global_scale", lambda value: 1 / value),
        ("E_GLOBAL_DIRECTION", f"{K_PROJ}.weight_global_scale", "divides"),
    ),
    "multiplies": (
        "moe",
        set_global(f"{EXPERT}.weight_scale_2", lambda value: 1 / value),
        ("E_GLOBAL_DIRECTION", f"{EXPERT}.weight_scale_2", "multiplies"),
    ),
    "zero-global": (
        "moe",
        set_global(f"{EXPERT}.weight_scale_2", np.zeros_like),
        ("E_GLOBAL_INVALID", f"{EXPERT}.weight_scale_2", "0.0"),
    ),
    "no-scale": (
        "ct",
        without(f"{K_PROJ}.weight_scale"),
        ("E_MISSING_COMPANION", f"{K_PROJ}.weight_scale"),
    ),
    "no-expert": (
        "moe",
        lambda _, tensors: [tensors.pop(n) for n in list(tensors) if n.startswith(EXPERT)][:0],
        ("E_MISSING_EXPERT", EXPERT),
    ),
    "excluded": (
        "ct",
        exclude("re:.*self_attn.*"),
        ("E_EXCLUDED_BUT_QUANTIZED", "model.layers.0.self_attn.q_proj"),
    ),
    "not-excluded": ("ct", dense_unsaid, ("E_UNQUANTIZED_NOT_EXCLUDED", f"{K_PROJ}.weight")),
    "mixed-parts": ("ct", dense_part, ("E_FUSED_MIXED", "qkv_proj", K_PROJ)),
    "beyond-fp16": (
        "ct",
        set_weight(NORM, 70144.0, ml_dtypes.bfloat16),
        ("E_FP16_RANGE", NORM, "70144 at [2]", "execution.device: cpu"),
    ),
    "router-beyond-fp16": (
        "moe",
        set_weight(ROUTER, -1e5),
        ("E_FP16_RANGE", ROUTER, "-100000 at [2, 0]"),
    ),
}
IN_FP16 = ("beyond-fp16", "router-beyond-fp16", "flushed")
"""Engines that hold weights in FP16, as those on GPUs do."""


@pytest.fixture(scope="module")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory, checkpoints: Any) -> Any:
    """Results of every bad checkpoint, and of one that looks bad and is not."""
    root = tmp_path_factory.mktemp("bad")
    jobs: list[dict[str, Any]] = []
    flushed = ("ct", flush(NORM), ())
    for name, (base, edit, _) in (CASES | {"flushed": flushed}).items():
        config = json.loads((models / base / "model" / "config.json").read_text())
        tensors = checkpoints.read(models / base / "model")
        edit(config, tensors)
        checkpoints.write(root / name, config, tensors)
        job = {"name": name, "model": str(root / name), "prompts": [[3]], "tokens": 2, "tp": 1}
        jobs.append(job | ({"dtype": "float16"} if name in IN_FP16 else {}))
    return checkpoints.run("bad", jobs, timeout_s=900)


@pytest.mark.parametrize("name", CASES)
def test_engine_bad_checkpoint_ends_with_code_and_tensor(results: Any, name: str) -> None:
    expected = CASES[name][2]

    message = results[name].get("error", "no error")

    assert message.startswith("ApplianceError: error[")
    assert [part for part in expected if part not in message] == [], message


def test_engine_says_which_weights_become_zero_in_fp16(results: Any) -> None:
    expected = f"nvfp4.flushed code=W_FP16_FLUSHED name={NORM} share=0.2500 tensors=1"

    assert len(results["flushed"]["tokens"][0]) == 2
    assert expected in results["flushed"]["log"]
