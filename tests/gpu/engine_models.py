"""The models that the engine is run with: random ones, made here, and what each must agree with."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import engine_stack  # beside this file, whose folder is in sys.path
import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
LONG = 40_960

FORMATS = ("fp8", "fp8-channels", "fp8-blocks", "moe-fp8", "moe-dense", "moe-quasar")
"""FP8 alone, experts of 8 and 16 bits, and groups of 128."""

PREFIX = 48
"""Tokens that half of the prompts share: three blocks of the cache."""


def maker(stem: str = "producers") -> ModuleType:
    """The plugin's tests make tiny models of every producer's layout; their quantizer is theirs."""
    path = REPOSITORY / "tests" / "plugin" / f"{stem}.py"
    spec = importlib.util.spec_from_file_location(f"tiny_{stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make(name: str, root: Path) -> None:
    """Write the model `name` to root/model and its dequantized twin to root/twin."""
    tiny = maker()
    if name == "dense":
        tiny.make_model(root, tiny.LLAMA, tiny.COMPRESSED_TENSORS, choose=tiny.all_but())
    elif name == "moe":
        keep = tiny.all_but("lm_head", ".mlp.gate")
        # Four layers: each of two pipeline stages needs a sparse one.
        config = tiny.QWEN3_MOE | {"num_hidden_layers": 4}
        tiny.make_model(root, config, tiny.MODELOPT, choose=keep)
    elif name == "mixed":
        layers = {
            module: {"quant_algo": "FP8" if "self_attn" in module else "NVFP4"}
            for module in tiny.matrices(tiny.LLAMA)
            if module.endswith("_proj")
        }
        mixed = {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers,
        }

        def choose(module: str) -> Any:
            if "self_attn" in module:
                return tiny.add_fp8
            return tiny.add_fp4 if "mlp" in module else tiny.add_dense

        tiny.make_model(root, tiny.LLAMA, mixed, choose=choose)
    elif name == "long":
        config = tiny.LLAMA | {"max_position_embeddings": LONG, "rope_theta": 1e6}
        tiny.make_model(root, config, tiny.COMPRESSED_TENSORS, choose=tiny.all_but())
    elif name == "hybrid":
        make_hybrid(tiny, root)
    elif name in FORMATS:
        maker("plain_models").make_plain_model(tiny, name, root)
    elif name == "stack":
        engine_stack.write(tiny, root / "model", engine_stack.QWEN2_14B)
    else:
        raise ValueError(name)


def make_hybrid(tiny: ModuleType, root: Path) -> None:
    """A hybrid with the heads of the 27B: of 128 beside attention of 256, part of one for images.

    Eight layers, so that each of two pipeline stages has one of attention.
    """
    hybrids = maker("hybrids")
    seeing: dict[str, Any] = hybrids.SEEING
    text = seeing["text_config"]
    kinds = text["layer_types"] * 2
    rope = text["rope_parameters"] | {"mrope_section": [11, 11, 10]}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}
    states = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    layers = {"layer_types": kinds, "num_hidden_layers": len(kinds), "rope_parameters": rope}
    config = seeing | {"text_config": text | heads | states | layers}
    hybrids.make_hybrid(tiny, root, tiny.COMPRESSED_TENSORS, config=config, mtp=True)


def make_served_hybrid(tokenizer: Path, root: Path) -> None:
    """Write a hybrid whose vocabulary is a tokenizer's, with its files, to root/model."""
    hybrids = maker("hybrids")
    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    seeing: dict[str, Any] = hybrids.SEEING
    text = seeing["text_config"] | {"vocab_size": vocabulary, "max_position_embeddings": 4096}
    hybrids.make_hybrid(
        maker(), root, maker().COMPRESSED_TENSORS, config=seeing | {"text_config": text}
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, root / "model" / name)


def make_twin(root: Path) -> None:
    """Decode the compressed-tensors checkpoint root/model into root/twin."""
    maker().write_twin(root / "model", root / "twin")


def prompts(vocabulary: int, longest: int = 200) -> list[list[int]]:
    """Eight prompts of 1 to `longest` tokens; four begin alike."""
    numbers = np.random.default_rng(20261129)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in numbers.integers(3, vocabulary, count)]

    shared = tokens(PREFIX)
    lengths = [1, 5, 17, longest // 2]
    return [tokens(n) for n in lengths] + [shared + tokens(n) for n in (1, 16, 33, longest // 2)]


if __name__ == "__main__":  # TOKENIZER FOLDER: the model for `engine_serve.py ... --random`
    make_served_hybrid(Path(sys.argv[1]), Path(sys.argv[2]))
