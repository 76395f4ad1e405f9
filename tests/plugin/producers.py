"""Tiny random models in every producer's layout with their dequantized twins.

The quantizer here is the tests' own: amax/6 with the FP8 and FP4 types of ml_dtypes. So the plugin
is judged by numbers that no code of the appliance has touched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray
PRUNED = "experts.6.up_proj"  # an all-zero matrix in the way that ModelOpt 0.47.0 writes one
HIDDEN, VOCABULARY = 256, 500  # no multiple of 64: a quantized head is padded by the engine
EXPERTS = 8
STORED = {
    "uint8": "U8",
    "int32": "I32",
    "float8_e4m3fn": "F8_E4M3",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
}
# Parts of one fused matrix with globals so far apart that no max() could serve them.
SPREAD = {"q_proj": 1.0, "k_proj": 0.3, "v_proj": 2.5, "gate_proj": 1.0, "up_proj": 3.7}

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 1,  # fewer than two ranks: each holds a copy
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "mlp_only_layers": [0],  # one dense and one sparse layer: every kind of module in one model
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]}
MODELOPT_LEGACY = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
}
QUASAR = {
    "quant_method": "nvfp4",
    "format": "quasar",
    "version": "1.0",
    "codebook": "e2m1",
    "group_size": 128,
    "ignore": ["lm_head"],
}
COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["re:.*mlp\\.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": None,
        }
    },
}


@dataclass
class Checkpoint:
    """One checkpoint to make: tensors by name, and what they stand for."""

    layout: str
    tensors: dict[str, Array] = field(default_factory=dict)
    twin: dict[str, Array] = field(default_factory=dict)


def fp4(weight: Array) -> tuple[Array, Array, np.float32, Array]:
    """Return codes [N, K/2], scales E4M3 [N, K/16], multiplier, and the values they stand for."""
    multiplier = np.float32(np.abs(weight).max() / 2688.0)
    blocks = (weight / multiplier).reshape(weight.shape[0], -1, 16)
    scales = (np.abs(blocks).max(axis=2) / 6.0).astype(ml_dtypes.float8_e4m3fn)
    divisors = np.maximum(scales.astype(np.float32), np.float32(2.0**-9))[..., None]
    codes = np.clip(blocks / divisors, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    exact = codes.astype(np.float32) * scales.astype(np.float32)[..., None]
    nibbles = codes.view(np.uint8).reshape(weight.shape) & 0xF
    packed = (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).astype(np.uint8)
    return packed, scales, multiplier, exact.reshape(weight.shape) * multiplier


def add_fp4(made: Checkpoint, module: str, weight: Array) -> None:
    """Add one matrix as NVFP4, with activation scales that nobody may read."""
    packed, scales, multiplier, values = fp4(weight)
    if made.layout == "modelopt":
        named: dict[str, Array] = {
            "weight": packed,
            "weight_scale_2": np.array(multiplier),
            "input_scale": np.array(0.0, np.float32),
        }
        if module.endswith(("k_proj", "v_proj")):  # as exporters with an FP8 cache write them
            named[f"{module[-6]}_scale"] = np.array(0.5, np.float32)
    else:
        named = {
            "weight_packed": packed,
            "weight_global_scale": np.array([1.0 / multiplier], np.float32),
            "input_global_scale": np.array([np.inf], np.float32),
        }
    named["weight_scale"] = scales
    if made.layout == "modelopt" and module.endswith(PRUNED):
        named["weight_scale_2"] = np.array(0.0, np.float32)
        named["weight_scale"] = np.full(scales.shape, 0xFF, np.uint8).view(scales.dtype)
        named["weight"] = np.full(packed.shape, 0x77, np.uint8)
        values = np.zeros_like(values)
    made.tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in named.items()}
    made.twin[f"{module}.weight"] = values.astype(np.float32)


def add_fp8(made: Checkpoint, module: str, weight: Array) -> None:
    """Add one matrix as E4M3, with one scale for all of it."""
    scale = np.abs(weight).max() / np.float32(448.0)
    codes = (weight / scale).astype(ml_dtypes.float8_e4m3fn)
    made.tensors[f"{module}.weight"] = codes
    made.tensors[f"{module}.weight_scale"] = np.asarray(scale, np.float32)
    made.tensors[f"{module}.input_scale"] = np.array(0.01, np.float32)
    made.twin[f"{module}.weight"] = codes.astype(np.float32) * scale


def add_blocks(made: Checkpoint, module: str, weight: Array) -> None:
    """Add one matrix as E4M3 with one scale for each 128 x 128 block."""
    rows, columns = weight.shape
    shape = (-(-rows // 128), -(-columns // 128))
    scale = np.zeros(shape, np.float32)
    for row, column in np.ndindex(shape):
        block = weight[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
        scale[row, column] = np.abs(block).max() / np.float32(448.0)
    spread = scale.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
    codes = (weight / spread).astype(ml_dtypes.float8_e4m3fn)
    made.tensors[f"{module}.weight"] = codes
    made.tensors[f"{module}.weight_scale_inv"] = scale
    made.twin[f"{module}.weight"] = codes.astype(np.float32) * spread


def add_quasar(made: Checkpoint, module: str, weight: Array) -> None:
    """Add one matrix as QUASAR-ST: words of eight codes, one FP16 scale for 128 columns."""
    blocks = weight.reshape(weight.shape[0], -1, 128)
    scales = (np.abs(blocks).max(axis=2) / 6.0).astype(np.float16)
    divisors = scales.astype(np.float32)[..., None]
    codes = np.clip(blocks / divisors, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    nibbles = codes.view(np.uint8).reshape(weight.shape) & 0xF
    packed = (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).astype(np.uint8)
    made.tensors[f"{module}.qweight"] = packed.view(np.int32)
    made.tensors[f"{module}.weight_scales"] = scales
    made.twin[f"{module}.weight"] = (codes.astype(np.float32) * divisors).reshape(weight.shape)


def add_dense(made: Checkpoint, module: str, weight: Array) -> None:
    """Add one tensor as it is."""
    made.tensors[f"{module}.weight"] = made.twin[f"{module}.weight"] = weight


def matrices(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of a model, by module."""
    hidden, head = config["hidden_size"], config["head_dim"]
    rows = {"q": config["num_attention_heads"] * head, "kv": config["num_key_value_heads"] * head}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCABULARY, hidden),
        "model.norm": (hidden,),
        "lm_head": (VOCABULARY, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        root = f"model.layers.{layer}"
        shapes |= {
            f"{root}.input_layernorm": (hidden,),
            f"{root}.post_attention_layernorm": (hidden,),
            f"{root}.self_attn.q_proj": (rows["q"], hidden),
            f"{root}.self_attn.k_proj": (rows["kv"], hidden),
            f"{root}.self_attn.v_proj": (rows["kv"], hidden),
            f"{root}.self_attn.o_proj": (hidden, rows["q"]),
        }
        if config["model_type"] == "qwen3_moe":
            shapes |= {f"{root}.self_attn.{part}_norm": (head,) for part in "qk"}
        sparse = "num_experts" in config and layer not in config["mlp_only_layers"]
        roots = [f"{root}.mlp.experts.{e}" for e in range(EXPERTS)] if sparse else [f"{root}.mlp"]
        width = config["moe_intermediate_size" if sparse else "intermediate_size"]
        if sparse:
            shapes[f"{root}.mlp.gate"] = (EXPERTS, hidden)
        for mlp in roots:
            shapes |= {f"{mlp}.{part}_proj": (width, hidden) for part in ("gate", "up")}
            shapes[f"{mlp}.down_proj"] = (hidden, width)
    return shapes


Add = Callable[[Checkpoint, str, Array], None]


def make_model(
    root: Path,
    config: Mapping[str, Any],
    metadata: Mapping[str, Any],
    *,
    choose: Callable[[str], Add],
    file: str = "config.json",
) -> Checkpoint:
    """Write one quantized random model to root/model and its twin to root/twin.

    `choose` gives how a module of two dimensions is stored. Every model of one config has the same
    random weights.
    """
    made = Checkpoint("compressed-tensors" if "config_groups" in metadata else "modelopt")
    numbers = np.random.default_rng(20261129)
    for module, shape in matrices(config).items():
        if len(shape) == 1:
            weight = numbers.uniform(0.5, 1.5, shape)
        else:
            weight = numbers.normal(0.0, 0.08 * SPREAD.get(module.rpartition(".")[2], 1.0), shape)
            if "experts" in module:  # experts, too, have globals of their own
                weight *= 0.5 + int(module.split(".")[-2]) / EXPERTS
        add = choose(module) if len(shape) == 2 else add_dense
        add(made, module, weight.astype(np.float32))
    plain = dict(config)
    if file == "config.json":
        plain["quantization_config"] = dict(metadata)
    write_checkpoint(root / "model", plain, made.tensors)
    if file != "config.json":
        (root / "model" / file).write_text(json.dumps(metadata))
    write_checkpoint(root / "twin", config, made.twin)
    return made


def all_but(*dense: str) -> Callable[[str], Add]:
    """Quantize every matrix but the embedding and the modules that end in one of the names."""
    kept = ("model.embed_tokens", *dense)
    return lambda module: add_dense if module.endswith(kept) else add_fp4


def stack_experts(source: Path, target: Path, *, turned: bool) -> None:
    """Write a copy of a MoE checkpoint of ModelOpt whose experts lie in stacks, and its twin.

    Gate and up of one expert share the gate's global then, so the twin's up changes with it.
    """
    tensors, twin = read_checkpoint(source / "model"), read_checkpoint(source / "twin")
    first = next(name for name in tensors if ".experts.0." in name)
    prefix = first.partition(".experts.")[0] + ".experts"
    for leaf, parts in STACKS.items():
        stacks: dict[str, list[Array]] = {"weight": [], "weight_scale": [], "weight_scale_2": []}
        for expert in range(EXPERTS):
            one = [
                {kind: tensors.pop(f"{prefix}.{expert}.{part}.{kind}") for kind in SUFFIXES}
                for part in parts
            ]
            factor = one[0]["weight_scale_2"]
            for part, half in zip(parts, one, strict=True):
                own = float(half["weight_scale_2"])
                codes = half["weight_scale"].view(np.uint8)
                if own == 0.0:  # a pruned matrix: its scales are no numbers
                    half["weight_scale"] = np.zeros_like(codes).view(FP8)
                else:
                    twin[f"{prefix}.{expert}.{part}.weight"] *= np.float32(float(factor) / own)
            for kind in ("weight", "weight_scale"):
                stacks[kind].append(np.concatenate([half[kind] for half in one]))
            stacks["weight_scale_2"].append(factor)
        for kind, arrays in stacks.items():
            name = f"{prefix}.{leaf}" if kind == "weight" else f"{prefix}.{leaf}_{kind}"
            whole = np.stack(arrays)
            is_turned = turned and whole.ndim == 3
            tensors[name] = whole.swapaxes(1, 2).copy() if is_turned else whole
    config = json.loads((source / "model" / "config.json").read_text())
    write_checkpoint(target / "model", config, tensors)
    config = json.loads((source / "twin" / "config.json").read_text())
    write_checkpoint(target / "twin", config, twin)


FP8 = ml_dtypes.float8_e4m3fn
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
SUFFIXES = ("weight", "weight_scale", "weight_scale_2", "input_scale")


def write_checkpoint(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Array]
) -> None:
    """Write a checkpoint of one safetensors file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entry = {"dtype": STORED[tensor.dtype.name], "shape": list(tensor.shape)}
        header[name] = entry | {"data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            out.write(np.ascontiguousarray(tensor).tobytes())


def read_checkpoint(directory: Path) -> dict[str, Array]:
    """Read every tensor of every safetensors file of a directory."""
    dtypes = {stored: np.dtype(name) for name, stored in STORED.items()}
    tensors: dict[str, Array] = {}
    for file in sorted(directory.glob("*.safetensors")):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = (start + at for at in entry["data_offsets"])
                values = np.frombuffer(data[begin:end], dtypes[entry["dtype"]]).copy()
                tensors[name] = values.reshape(entry["shape"])
    return tensors


def write_twin(quantized: Path, twin: Path) -> None:
    """Decode a compressed-tensors checkpoint into a dense FP32 one."""
    tensors = read_checkpoint(quantized)
    dense: dict[str, Array] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            codes = np.stack((tensor & 0xF, tensor >> 4), axis=-1).astype(np.uint8)
            values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
            scales = tensors[f"{module}.weight_scale"].astype(np.float32)[..., None]
            exact = values.reshape(*scales.shape[:2], 16) * scales
            divisor = tensors[f"{module}.weight_global_scale"].reshape(())
            dense[f"{module}.weight"] = exact.reshape(tensor.shape[0], -1) / divisor
        elif not suffix.endswith("_scale"):
            dense[name] = tensor.astype(np.float32)
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    write_checkpoint(twin, config | {"torch_dtype": "float32"}, dense)
