"""A stack of layers of a large model's widths with random NVFP4 weights, to time its steps.

Codes, block scales and globals are drawn directly, since quantizing gigabytes takes minutes. The
weights of a row are about as large as those of a trained model, so that activations stay in FP16's
range through the whole stack.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

QWEN2_14B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 13_824,
    "num_hidden_layers": 8,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}
"""The widths of a Qwen2.5-14B; 8 of its 48 layers and a short vocabulary."""

_SCALE_CODES = (0x30, 0x40)  # E4M3 codes from 0.5 up to 2, exclusive
_MEAN_SQUARE_E2M1 = (0 + 0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8
_MEAN_SQUARE_SCALE = float(
    np.square(
        np.arange(*_SCALE_CODES, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ).mean()
)

Array = np.ndarray


def nvfp4(numbers: np.random.Generator, rows: int, columns: int) -> dict[str, Array]:
    """Tensors of one random matrix [rows, columns] in compressed-tensors' names."""
    scales = numbers.integers(*_SCALE_CODES, (rows, columns // 16), dtype=np.uint8)
    # Of the width alone, so that the parts of a fused matrix share it, as upstream needs.
    divisor = math.sqrt(_MEAN_SQUARE_E2M1 * _MEAN_SQUARE_SCALE * columns)
    return {
        "weight_packed": numbers.integers(0, 256, (rows, columns // 2), dtype=np.uint8),
        "weight_scale": scales.view(ml_dtypes.float8_e4m3fn),
        "weight_global_scale": np.array([divisor], np.float32),
    }


def stack(config: dict[str, Any], seed: int = 14) -> dict[str, Array]:
    """Every tensor of the model by its name."""
    numbers = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = hidden // config["num_attention_heads"]
    keys = config["num_key_value_heads"] * size

    def halves(*shape: int, scale: float) -> Array:
        return (numbers.standard_normal(shape, dtype=np.float32) * scale).astype(np.float16)

    tensors = {
        "model.embed_tokens.weight": halves(config["vocab_size"], hidden, scale=1.0),
        "model.norm.weight": np.ones(hidden, np.float16),
        "lm_head.weight": halves(config["vocab_size"], hidden, scale=4 / math.sqrt(hidden)),
    }
    matrices = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = np.ones(hidden, np.float16)
        for name, (rows, columns) in matrices.items():
            made = nvfp4(numbers, rows, columns)
            tensors |= {f"{prefix}.{name}.{part}": values for part, values in made.items()}
            if name.endswith(("q_proj", "k_proj", "v_proj")):
                tensors[f"{prefix}.{name}.bias"] = halves(rows, scale=0.1)
    return tensors


def write(tiny: Any, folder: Path, config: dict[str, Any]) -> None:
    """Write the stack as a checkpoint, with the writer of the plugin's tests."""
    quantized = config | {"quantization_config": tiny.COMPRESSED_TENSORS | {"ignore": ["lm_head"]}}
    tiny.write_checkpoint(folder, quantized, stack(config))
