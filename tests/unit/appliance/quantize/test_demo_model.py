"""The demo model's own weights: equal to compressed-tensors, as exact and as fast as documented."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.checkpoint.tensors import open_tensors
from appliance.quantize.job import Job, quantize
from appliance.quantize.settings import settings_of

pytestmark = [pytest.mark.slow, pytest.mark.serial]

SITES = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def test_rtn_of_the_demo_model_equals_compressed_tensors(
    demo_model: Path, tmp_path: Path, reference_packer: Callable[..., Any]
) -> None:
    quantize(Job(demo_model, tmp_path / "rtn", settings_of("rtn", threads=2)), io.StringIO())

    with open_tensors(demo_model) as source, open_tensors(tmp_path / "rtn") as made:
        for layer in (0, 17):
            for parts in SITES:
                block = "mlp" if parts[0] in {"gate_proj", "down_proj"} else "self_attn"
                modules = [f"model.layers.{layer}.{block}.{part}" for part in parts]
                whole = np.concatenate([source.float32(f"{name}.weight") for name in modules])
                packed, scales, divisor = reference_packer(whole)

                for kind, expected in (("packed", packed), ("scale", scales)):
                    stored = [made.array(f"{name}.weight_{kind}") for name in modules]
                    np.testing.assert_array_equal(np.concatenate(stored), expected)
                for name in modules:
                    assert made.array(f"{name}.weight_global_scale")[0] == divisor


def test_fast_on_the_demo_model_keeps_its_error_and_its_speed(
    demo_model: Path, tmp_path: Path
) -> None:
    begun = time.process_time()

    report = quantize(
        Job(demo_model, tmp_path / "fast", settings_of("fast", threads=2)), io.StringIO()
    )

    # Processor time of all threads: 15 M weights/s on two cores are 7.5 M per core and second.
    per_core = report["weights"] / (time.process_time() - begun)
    assert report["relative_mse"] < 6.8e-3
    assert max(tensor["relative_mse"] for tensor in report["tensors"].values()) < 8e-3
    assert per_core > 7.5e6
