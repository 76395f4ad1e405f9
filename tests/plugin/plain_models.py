"""Tiny models whose matrices, or experts alone, are FP8 or dense, and QUASAR-ST experts.

`producers` is the module of the other tiny models, handed in by whoever loads this one by its path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray
FP8 = ml_dtypes.float8_e4m3fn

MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.gate"]}
FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
STACKED_FP8 = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "model.layers.0": {"quant_algo": "FP8_PB_WO"},
        "model.layers.1.self_attn": {"quant_algo": "FP8_PB_WO"},
        "model.layers.1.mlp.experts.gate_up_proj": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "model.layers.1.mlp.experts.down_proj": {"quant_algo": "FP8"},
    },
}
FP8_CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": [],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}


def add_channels(made: Any, module: str, weight: Array) -> None:
    """Add one matrix as E4M3 with a BF16 scale for each row, as compressed-tensors writes them."""
    scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(448.0)
    stored = (scale * np.float32(1.01)).astype(ml_dtypes.bfloat16)
    codes = (weight / stored.astype(np.float32)).astype(FP8)
    made.tensors[f"{module}.weight"] = codes
    made.tensors[f"{module}.weight_scale"] = stored
    made.twin[f"{module}.weight"] = codes.astype(np.float32) * stored.astype(np.float32)


def stack_plain_experts(
    producers: ModuleType, source: Path, target: Path, metadata: Mapping[str, Any] | None = None
) -> None:
    """Write a copy of a MoE checkpoint whose experts lie in stacks, and its twin.

    Both are stored with input before output features. With metadata, experts are E4M3: one scale a
    row of gate and up, one an expert for down. Without, everything is what the twin is.
    """
    twin = producers.read_checkpoint(source / "twin")
    tensors = dict(twin) if metadata is None else producers.read_checkpoint(source / "model")
    first = next(name for name in twin if ".experts.0." in name)
    prefix = first.partition(".experts.")[0] + ".experts"
    for leaf, parts in producers.STACKS.items():
        names = [
            [f"{prefix}.{expert}.{part}" for part in parts] for expert in range(producers.EXPERTS)
        ]
        whole = np.stack(
            [np.concatenate([twin[f"{part}.weight"] for part in each]) for each in names]
        )
        for name in [
            name for name in tensors if name.startswith(tuple(n for each in names for n in each))
        ]:
            del tensors[name]
        if metadata is not None:
            axes = (1, 2) if leaf == "down_proj" else (2,)
            scale = np.abs(whole).max(axis=axes, keepdims=True) / np.float32(448.0)
            codes = (whole / scale).astype(FP8)
            shape = (producers.EXPERTS,) if leaf == "down_proj" else scale.shape
            tensors[f"{prefix}.{leaf}_weight_scale"] = scale.reshape(shape)
            for each, values in zip(names, codes.astype(np.float32) * scale, strict=True):
                for part, share in zip(each, np.split(values, len(parts)), strict=True):
                    twin[f"{part}.weight"] = share
            whole = codes
        # Gate and up are square here: that down lies turned says that they do too.
        tensors[f"{prefix}.{leaf}"] = whole.swapaxes(1, 2).copy()
    config = json.loads((source / "twin" / "config.json").read_text())
    producers.write_checkpoint(target / "twin", config, twin)
    stated = {} if metadata is None else {"quantization_config": dict(metadata)}
    producers.write_checkpoint(target / "model", config | stated, tensors)


def plain_models(producers: ModuleType) -> dict[str, tuple[Any, ...]]:
    """Return configuration, metadata and the choice of each matrix's form, by the model's name."""

    def scheme(add: Callable[..., None], *dense: str) -> Callable[[str], Callable[..., None]]:
        kept = ("model.embed_tokens", ".mlp.gate", *dense)
        return lambda module: producers.add_dense if module.endswith(kept) else add

    def dense_experts(module: str) -> Callable[..., None]:
        return producers.add_dense if ".experts." in module else scheme(producers.add_fp4)(module)

    llama, moe = producers.LLAMA, producers.QWEN3_MOE
    gates = {"ignore": ["lm_head", "re:.*mlp\\.gate$"]}
    kept = {"ignore": ["*.mlp.gate", "model.layers.1.mlp.experts*"]}
    listed = {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate"]}
    blocks = scheme(producers.add_blocks, "lm_head")
    quasar = scheme(producers.add_quasar, "lm_head")
    return {
        "fp8": (llama, MODELOPT_FP8, scheme(producers.add_fp8, "lm_head")),
        "fp8-channels": (llama, FP8_CHANNELS, scheme(add_channels)),
        "fp8-blocks": (llama, FP8_BLOCKS, blocks),
        "moe-fp8": (moe, FP8_BLOCKS | listed, blocks),
        "moe-dense": (moe, producers.MODELOPT | kept, dense_experts),
        "moe-quasar": (moe, producers.QUASAR | gates, quasar),
    }


def make_plain_model(producers: ModuleType, name: str, root: Path) -> None:
    """Write one of `plain_models` to root/model and its twin to root/twin."""
    config, metadata, choose = plain_models(producers)[name]
    producers.make_model(root, config, metadata, choose=choose)


def make_plain(producers: ModuleType, root: Path) -> None:
    """Write all of them, and two whose experts lie in stacks, each below its name."""
    for name in plain_models(producers):
        make_plain_model(producers, name, root / name)
    stack_plain_experts(producers, root / "moe-fp8", root / "moe-fp8-stacked", STACKED_FP8)
    stack_plain_experts(producers, root / "moe-dense", root / "moe-plain")
