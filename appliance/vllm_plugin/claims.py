"""Which checkpoints the method takes over, by their quantization config alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

OWN_METHODS = ("nvfp4", "fp4", "fp8", "fbgemm_fp8")


def is_served(config: Mapping[str, Any]) -> bool:
    """Say if a quantization config describes NVFP4 or FP8 weights, of whatever producer.

    Args:
        config: `quantization_config` of config.json, or the content of hf_quant_config.json.
    """
    method = str(config.get("quant_method", "")).lower().replace("compressed_", "compressed-")
    if method == "compressed-tensors":
        return any(_is_float_group(group) for group in _objects(config.get("config_groups")))
    section = config.get("quantization", config)
    algorithm = (
        str(cast("Mapping[str, Any]", section).get("quant_algo", ""))
        if isinstance(section, Mapping)
        else ""
    ).upper()
    if method.startswith("modelopt") or algorithm:
        # MXFP8 has scales of another kind.
        is_fp8 = algorithm.startswith("FP8")
        return is_fp8 or "NVFP4" in algorithm or algorithm == "MIXED_PRECISION"
    return method in OWN_METHODS


def _is_float_group(group: Mapping[str, Any]) -> bool:
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        return False
    known = cast("Mapping[str, Any]", weights)
    return known.get("num_bits") in (4, 8) and known.get("type") == "float"


def _objects(value: object) -> list[Mapping[str, Any]]:
    if not isinstance(value, Mapping):
        return []
    entries = cast("Mapping[str, object]", value).values()
    return [cast("Mapping[str, Any]", entry) for entry in entries if isinstance(entry, Mapping)]
