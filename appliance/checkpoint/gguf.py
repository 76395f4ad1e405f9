"""Turns a GGUF file of a Llama-like model into a Hugging Face directory.

NVFP4 stays NVFP4, value for value, in ModelOpt's layout; all else becomes FP16. Only what is known
to come out right is taken: the `llama` architecture without rope scaling, and byte-level BPE
tokenizers whose splitting rule is known. Everything else is refused.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.checkpoint.document import load_own
from appliance.checkpoint.faults import refuse
from appliance.checkpoint.gguf_fields import count, field, items, number, open_file, optional
from appliance.checkpoint.gguf_tokenizer import build_tokenizer, write_tokenizer
from appliance.checkpoint.gguf_weights import Weight, plan_weights
from appliance.checkpoint.staging import Staging, require_new, require_whole
from appliance.checkpoint.writer import (
    ShardWriter,
    TensorSpec,
    plan_shards,
    require_room,
    write_index,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import gguf
    from numpy.typing import NDArray

REPORT_NAME = "import_report.json"

_SHARD_BYTES = 4 * 1024**3


@dataclass(frozen=True)
class ImportReport:
    """What an import made.

    Attributes:
        source: File name of the GGUF file.
        source_sha256: SHA-256 of it.
        architecture: `general.architecture`.
        license: `general.license`, empty if the file does not say.
        tensors: Number of tensors written.
        weights: Number of weights written.
    """

    source: str
    source_sha256: str
    architecture: str
    license: str
    tensors: int
    weights: int


def import_gguf(source: Path, target: Path) -> ImportReport:
    """Write the twin of a GGUF file as a new directory: FP16, with NVFP4 parts kept packed.

    An output that the same source already made is left as it is.

    Raises:
        ApplianceError: GGUF_UNREADABLE, GGUF_ARCHITECTURE, GGUF_TOKENIZER, GGUF_METADATA,
            GGUF_TENSOR (exit 30), GGUF_RANGE (exit 30) if a weight is beyond FP16; OUTPUT_EXISTS,
            OUTPUT_FOREIGN, OUTPUT_BUSY (exit 2); OUTPUT_DAMAGED (exit 31); DISK_FULL,
            OUTPUT_UNWRITABLE (exit 12).
    """
    reader = open_file(source)
    report = _report(source, reader)
    weights = plan_weights(source, reader)
    specs = [spec for weight in weights for spec in weight.specs()]
    if _made_before(target, report):
        require_whole(target, {spec.name: (spec.dtype, spec.shape) for spec in specs})
        return report
    require_new(target)
    config = _config(source, reader, weights)
    tokenizer = build_tokenizer(source, reader)
    require_room(target.parent, sum(spec.nbytes for spec in specs))
    with Staging(target, source=source) as staging:
        staging.clear()
        shards = plan_shards(specs, limit_bytes=_SHARD_BYTES)
        _write_weights(source, staging.path, shards, weights)
        write_tokenizer(staging.path, tokenizer, source, reader)
        write_json(staging.path / "config.json", config)
        write_json(staging.path / "generation_config.json", _generation(config))
        write_json(staging.path / REPORT_NAME, vars(report))
        write_index(staging.path, shards)
        staging.commit()
    return report


def _write_weights(
    source: Path,
    directory: Path,
    shards: Mapping[str, tuple[TensorSpec, ...]],
    weights: list[Weight],
) -> None:
    by_name = {spec.name: weight for weight in weights for spec in weight.specs()}
    for shard, specs in shards.items():
        with ShardWriter(directory / shard, specs) as writer:
            made: dict[str, NDArray[Any]] = {}
            for spec in specs:
                if spec.name not in made:
                    made = by_name[spec.name].arrays(source)
                writer.write(spec.name, made[spec.name])


def _report(source: Path, reader: gguf.GGUFReader) -> ImportReport:
    architecture = str(field(source, reader, "general.architecture"))
    if architecture != "llama":
        raise refuse(
            "GGUF_ARCHITECTURE",
            f"{source} general.architecture",
            "the importer knows the architecture llama",
            architecture,
            "start from the model's safetensors checkpoint instead",
        )
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return ImportReport(
        source=source.name,
        source_sha256=digest,
        architecture=architecture,
        license=str(optional(reader, "general.license", "")),
        tensors=len(reader.tensors),
        weights=sum(int(tensor.n_elements) for tensor in reader.tensors),
    )


def _made_before(target: Path, report: ImportReport) -> bool:
    """Whether `target` is the finished import of the same file."""
    return load_own(target / REPORT_NAME) == dict(vars(report))


def _config(source: Path, reader: gguf.GGUFReader, weights: list[Weight]) -> dict[str, Any]:
    """Build config.json; the keys are the older ones, which old and new transformers both read."""
    if reader.get_field("llama.rope.scaling.type") is not None:
        raise refuse(
            "GGUF_METADATA",
            f"{source} llama.rope.scaling.type",
            "a model without rope scaling",
            str(optional(reader, "llama.rope.scaling.type", "")),
            "start from the model's safetensors checkpoint instead",
        )

    def size(key: str, default: int | None = None) -> int:
        return count(source, reader, key, default)

    def token(role: str, default: int | None = None) -> int:
        return int(number(source, reader, f"tokenizer.ggml.{role}_token_id", default))

    heads, hidden, eos = (
        size("llama.attention.head_count"),
        size("llama.embedding_length"),
        token("eos"),
    )
    quantized = _quantization(weights)
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": token("bos", eos),
        "eos_token_id": eos,
        "head_dim": size("llama.attention.key_length", max(1, hidden // heads)),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": size("llama.feed_forward_length"),
        "max_position_embeddings": size("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": size("llama.block_count"),
        "num_key_value_heads": size("llama.attention.head_count_kv", heads),
        "pad_token_id": token("padding", eos),
        # GGUF keeps FP32; the shortest decimal of that FP32 is the number the model was made with.
        "rms_norm_eps": _short(number(source, reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(number(source, reader, "llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": not any(weight.module == "lm_head" for weight in weights),
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": len(items(source, reader, "tokenizer.ggml.tokens")),
    } | ({"quantization_config": quantized} if quantized else {})


def _quantization(weights: list[Weight]) -> dict[str, Any]:
    """Return ModelOpt's metadata, whose global multiplies as GGUF's does; empty without NVFP4."""
    if not any(weight.is_packed for weight in weights):
        return {}
    dense = [weight.module for weight in weights if not weight.is_packed]
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": [name for name in dense if name.endswith(("_proj", "lm_head"))],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
            }
        },
        "producer": {"name": "gguf"},
    }


def _short(value: float) -> float:
    return float(str(np.float32(value)))


def _generation(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"_from_model_config": True, **{key: config[key] for key in keys}}
