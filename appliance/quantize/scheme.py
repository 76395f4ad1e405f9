"""What a quantized matrix is stored as, and how config.json says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.checkpoint.writer import TensorSpec
from appliance.quantize.native import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GROUP = 128
"""Weights that share one FP16 scale in the QUASAR form."""


@dataclass(frozen=True)
class Scheme:
    """One way to store a matrix [N, K].

    Attributes:
        block: K must be a multiple of it.
        outputs: Tensors of a module by its name, N and K: codes, scales, and a global if there is.
        config: The quantization_config for an `ignore` list.
    """

    block: int
    outputs: Callable[[str, int, int], tuple[TensorSpec, ...]]
    config: Callable[[Sequence[str]], dict[str, Any]]


def quantization_config(ignore: Sequence[str]) -> dict[str, Any]:
    """Describe the output as compressed-tensors does: NVFP4 weights, 16-bit activations.

    Args:
        ignore: Linear modules that stayed dense: exact names, or `re:` and a regular expression.
    """
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": BLOCK,
        "num_bits": 4,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
        "strategy": "tensor_group",
        "symmetric": True,
        "type": "float",
    }
    group: dict[str, Any] = {
        "format": "nvfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "nvfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def quasar_config(ignore: Sequence[str]) -> dict[str, Any]:
    """Describe the output as QUASAR-ST 1 with groups of 128 and FP16 scales."""
    return {
        "quant_method": "nvfp4",
        "format": "quasar",
        "version": "1.0",
        "codebook": "e2m1",
        "group_size": GROUP,
        "scale_dtype": "float16",
        "block_shape": [1, 16, 16, 16],
        "ignore": list(ignore),
    }


def _nvfp4_outputs(module: str, rows: int, columns: int) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec(f"{module}.weight_packed", "U8", (rows, columns // 2)),
        TensorSpec(f"{module}.weight_scale", "F8_E4M3", (rows, columns // BLOCK)),
        TensorSpec(f"{module}.weight_global_scale", "F32", (1,)),
    )


def _quasar_outputs(module: str, rows: int, columns: int) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec(f"{module}.qweight", "I32", (rows, columns // 8)),
        TensorSpec(f"{module}.weight_scales", "F16", (rows, columns // GROUP)),
    )


NVFP4 = Scheme(BLOCK, _nvfp4_outputs, quantization_config)
"""compressed-tensors names: blocks of 16 under E4M3 scales, one FP32 divisor."""

QUASAR_G128 = Scheme(GROUP, _quasar_outputs, quasar_config)
"""QUASAR-ST 1: groups of 128 under FP16 scales, no global."""
