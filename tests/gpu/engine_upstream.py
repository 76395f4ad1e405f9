"""A copy of a checkpoint that upstream's own NVFP4 route reads, so that its steps can be timed.

Upstream has kernels for weights of 4 bits and activations of 16 in its extension alone. What runs
without it is its emulation: it rounds the activations to NVFP4 as well, then dequantizes both. That
takes a checkpoint which says so and has a global scale for each matrix's input.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

INPUT_GLOBAL = 4.0
"""Largest input 448 * 6 / 4 = 672; blocks down to 0.02 keep a normal E4M3 scale."""

GLOBAL = ".weight_global_scale"


def activations(weights: dict[str, Any]) -> dict[str, Any]:
    """The `input_activations` of a config group whose weights are these."""
    return weights | {"dynamic": "local", "observer": None}


def write(model: Path, folder: Path) -> None:
    """Write the copy of `model` (compressed-tensors, one file): its weights are links.

    Raises:
        ValueError: the checkpoint is of another kind, or has no NVFP4 matrix.
    """
    (weights,) = model.glob("*.safetensors")
    with safe_open(weights, framework="numpy") as opened:
        modules = [key.removesuffix(GLOBAL) for key in opened.keys() if key.endswith(GLOBAL)]  # noqa: SIM118
    config = json.loads((model / "config.json").read_text())
    groups = config.get("quantization_config", {}).get("config_groups", {})
    if not modules or not groups:
        raise ValueError(f"{model} must hold NVFP4 of compressed-tensors")
    for group in groups.values():
        group["input_activations"] = activations(group["weights"])
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    scales = {
        f"{module}.input_global_scale": np.array([INPUT_GLOBAL], np.float32) for module in modules
    }
    save_file(scales, folder / "inputs.safetensors")
