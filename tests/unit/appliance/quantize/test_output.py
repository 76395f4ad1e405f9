"""What compressed-tensors makes of our output."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from appliance.checkpoint.tensors import open_tensors
from appliance.quantize.job import Job, quantize
from appliance.quantize.settings import settings_of


def test_output_is_read_by_compressed_tensors(llama: Any, tmp_path: Path, oracle: Any) -> None:
    source = llama.write(tmp_path / "src")
    settings = settings_of("fast", threads=1)
    report = quantize(Job(source, tmp_path / "dst", settings), io.StringIO())
    stored = json.loads((tmp_path / "dst/config.json").read_text())["quantization_config"]

    config = oracle.schemes.QuantizationConfig.model_validate(stored)

    scheme = config.config_groups["group_0"]
    assert config.format == "nvfp4-pack-quantized"
    assert scheme.weights.strategy == "tensor_group"
    assert scheme.input_activations is None
    assert oracle.nvfp4.NVFP4PackedCompressor.can_compress(oracle.torch.nn.Linear, scheme)
    with open_tensors(tmp_path / "dst") as made, open_tensors(source) as dense:
        for module, entry in report["tensors"].items():
            state = {
                name: oracle.torch.from_numpy(made.array(f"{module}.{name}").copy())
                for name in ("weight_packed", "weight_scale", "weight_global_scale")
            }
            state["weight_scale"] = state["weight_scale"].view(oracle.torch.float8_e4m3fn)
            weight = oracle.nvfp4.NVFP4PackedCompressor.decompress(state, scheme)["weight"]
            exact = dense.float32(f"{module}.weight")
            error = ((weight.float().numpy() - exact) ** 2).sum() / (exact**2).sum()
            # compressed-tensors decodes to BF16, which adds rounding of its own.
            np.testing.assert_allclose(error, entry["relative_mse"], rtol=1e-2)
