"""The parsers that are fuzzed: sound files to start from, and how each parser is run on them."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from appliance.checkpoint.container import HEADER, check_payload
from appliance.checkpoint.container_arrays import ContainerReader
from appliance.checkpoint.container_writer import ContainerEntry, write_container
from appliance.checkpoint.document import read_document
from appliance.checkpoint.expressions import PatternError, compile_all
from appliance.checkpoint.header import read_header
from appliance.checkpoint.identity import identify
from appliance.checkpoint.legacy import open_container
from appliance.checkpoint.manifest import verify_manifest
from appliance.checkpoint.patterns import shell_matcher
from appliance.checkpoint.read import summarize
from appliance.checkpoint.template import find_templates
from appliance.checkpoint.writer import ShardWriter, TensorSpec

NAMES = ["model.layers.0.self_attn.q_proj", "lm_head", "a" * 200, "model.layers.17.mlp.experts.3.x"]


@dataclass(frozen=True)
class Family:
    """One parser under test.

    Attributes:
        seeds: Sound files to start from, by name.
        write: Puts changed bytes of a seed where the parser looks for them.
        parse: Runs the parser on the directory.
    """

    seeds: dict[str, bytes]
    write: Callable[[Path, str, bytes, bool], None]
    parse: Callable[[Path], None]


def tensors(*, divisors: bool = False) -> dict[str, tuple[str, np.ndarray]]:
    """Return a sound model of one layer, in compressed-tensors' layout if globals divide."""
    names = ("weight_packed", "weight_global_scale") if divisors else ("weight", "weight_scale_2")
    found: dict[str, tuple[str, np.ndarray]] = {}
    for name, (rows, columns) in LINEARS.items():
        module = f"model.layers.0.{name}"
        found[f"{module}.{names[0]}"] = ("U8", np.full((rows, columns // 2), 0x21, np.uint8))
        found[f"{module}.weight_scale"] = (
            "F8_E4M3",
            np.full((rows, columns // 16), 0x38, np.uint8),
        )
        factor = np.array([100.0] if divisors else 0.01, np.float32)
        found[f"{module}.{names[1]}"] = ("F32", factor)
    for name in ("input_layernorm", "post_attention_layernorm"):
        found[f"model.layers.0.{name}.weight"] = ("BF16", np.zeros(32, np.uint16))
    found["model.norm.weight"] = ("BF16", np.zeros(32, np.uint16))
    for name in ("model.embed_tokens", "lm_head"):
        found[f"{name}.weight"] = ("BF16", np.zeros((8, 32), np.uint16))
    return found


LINEARS = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 8,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16}}},
    },
}
CT_CONFIG = CONFIG | {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": ["re:.*lm_head", "re:.*vision.(gate|up)_proj.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "tensor_group",
                    "group_size": 16,
                },
            }
        },
    }
}
LEGACY = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}


def checkpoint_bytes(*, divisors: bool = False) -> bytes:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.safetensors"
        made = tensors(divisors=divisors)
        specs = [TensorSpec(name, kind, array.shape) for name, (kind, array) in made.items()]
        with ShardWriter(path, specs) as writer:
            for name, (_, array) in made.items():
                writer.write(name, array)
        return path.read_bytes()


def container_bytes() -> bytes:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.qsr"
        codes = np.full((8, 16), 0x76543210, np.uint32)
        wide = ("F16", np.full((8, 1), 0.5, np.float16))
        narrow = ("F8_E4M3", np.full((8, 8), 0x38, np.uint8))
        factor = ("F32", np.array([0.1], np.float32))
        qweight = ("U32", codes)
        write_container(
            path,
            [
                ContainerEntry("a.b", (8, 128), {"qweight": qweight, "scales": wide}, "e2m1", 128),
                ContainerEntry(
                    "a.c",
                    (8, 128),
                    {"qweight": qweight, "scales": narrow, "global": factor},
                    "e2m1",
                    16,
                ),
                ContainerEntry("n.weight", (5,), {"data": ("F32", np.zeros(5, np.float32))}),
            ],
            {"name": "fuzz"},
        )
        return path.read_bytes()


def inline_bytes() -> bytes:
    scales = np.full(5, 0.5, np.float16).tobytes() + b"\0\0"
    return b"\x1c\x0a\x0d\x0a" + (5).to_bytes(4, "little") + scales + b"\x21" * 64 * 5


OLD_INDEX = {
    "format": "quasar-legacy",
    "version": "0",
    "codebook": "e2m1",
    "group_size": 128,
    "order": [{"name": "a.b", "shape": [1, 256]}, {"name": "a.c", "shape": [3, 128]}],
}


def write_plain(root: Path, name: str, data: bytes, _: bool) -> None:
    (root / name).write_bytes(data)


def write_shard(root: Path, name: str, data: bytes, mend: bool) -> None:
    """Mended, the length field fits the header again, so that the changes get past it."""
    if mend and len(data) > 8:
        length = max(2, min(len(data) - 8, data.rfind(b"}") - 7))
        data = length.to_bytes(8, "little") + data[8:]
    (root / name).write_bytes(data)


def write_mended_container(root: Path, name: str, data: bytes, mend: bool) -> None:
    """Mended, sizes and checksums fit again, so that the changes get past them."""
    if mend and len(data) >= 64 and name.endswith(".qsr"):
        fields = list(HEADER.unpack(data[:64]))
        length = min(fields[6], len(data) - 64)
        fields[6], fields[8] = length, len(data)
        fields[9] = zlib.crc32(data[64 : 64 + length])
        fields[10] = zlib.crc32(HEADER.pack(*fields)[:52])
        data = HEADER.pack(*fields) + data[64:]
    (root / name).write_bytes(data)


def parse_container(root: Path) -> None:
    for path in sorted(root.glob("*.qsr")) + sorted(root.glob("*model.bin")):
        opened = open_container(path)
        check_payload(opened)
        reader = ContainerReader(opened)
        for tensor in opened.tensors:
            if tensor.is_dense:
                reader.array(tensor, "data")
            else:
                reader.matrix(tensor).values()


def parse_checkpoint(root: Path) -> None:
    summarize(root)
    identify(root)


def parse_patterns(root: Path) -> None:
    text = (root / "patterns").read_bytes().decode("latin-1")
    for line in text.split("\n"):
        with contextlib.suppress(PatternError):
            compiled = compile_all([line])
            assert all(compiled.matches(name) in (True, False) for name in NAMES)
        with contextlib.suppress(PatternError):
            globs = shell_matcher([line])
            assert all(globs.matches(name) in (True, False) for name in NAMES)


def parse_templates(root: Path) -> None:
    find_templates(root, read_document(root / "tokenizer_config.json"))


def parse_gguf(root: Path) -> None:
    from appliance.checkpoint.gguf import import_gguf  # noqa: PLC0415 - heavy, this family only

    shutil.rmtree(root / "out", ignore_errors=True)
    import_gguf(root / "model.gguf", root / "out")


def gguf_bytes() -> bytes:
    import gguf  # noqa: PLC0415 - heavy, this family only

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(64)
        writer.add_embedding_length(32)
        writer.add_block_count(1)
        writer.add_feed_forward_length(48)
        writer.add_head_count(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "b", "ab"])
        writer.add_token_types([1, 1, 3])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(2)
        writer.add_tensor("token_embd.weight", np.zeros((3, 32), np.float16))
        writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def families() -> dict[str, Callable[[], Family]]:
    """Return the families by name; each is made when it is run."""
    index = json.dumps(OLD_INDEX).encode()
    shard = checkpoint_bytes()
    documents = {
        "config.json": json.dumps(CONFIG).encode(),
        "hf_quant_config.json": json.dumps(LEGACY).encode(),
        "model.safetensors.index.json": json.dumps(
            {"weight_map": dict.fromkeys(tensors(), "model.safetensors")}
        ).encode(),
    }
    split = {"model.bin": b"\x21" * 320, "scales.bin": np.full(5, 0.5, "<f2").tobytes()}
    sums = f"{'0' * 64}  model.safetensors\n{'1' * 64} *config.json\n".encode()
    regexes = "\n".join(TEXTS_OF_PATTERNS).encode("latin-1")
    templates = json.dumps(
        {"chat_template": [{"name": "a", "template": "{{ messages }}"}]}
    ).encode()
    return {
        "header": lambda: Family({"model.safetensors": shard}, write_shard, parse_header),
        "tensors": lambda: Family(
            documents | {"model.safetensors": shard}, write_shard, parse_checkpoint
        ),
        "metadata": lambda: Family(
            documents | {"model.safetensors": shard}, write_plain, parse_checkpoint
        ),
        "compressed": lambda: Family(
            {
                "config.json": json.dumps(CT_CONFIG).encode(),
                "model.safetensors": checkpoint_bytes(divisors=True),
            },
            write_plain,
            parse_checkpoint,
        ),
        "container": lambda: Family(
            {"model.qsr": container_bytes()}, write_mended_container, parse_container
        ),
        "inline": lambda: Family(
            {"model.qsr": inline_bytes(), "quasar_index.json": index}, write_plain, parse_container
        ),
        "split": lambda: Family(split | {"quasar_index.json": index}, write_plain, parse_container),
        "manifest": lambda: Family({"SHA256SUMS": sums}, write_plain, check),
        "patterns": lambda: Family({"patterns": regexes}, write_plain, parse_patterns),
        "templates": lambda: Family(
            {"tokenizer_config.json": templates, "chat_template.json": templates},
            write_plain,
            parse_templates,
        ),
        "gguf": lambda: Family({"model.gguf": gguf_bytes()}, write_plain, parse_gguf),
    }


TEXTS_OF_PATTERNS = [
    r".*visual.*",
    r"model\.layers\.\d+\.mlp\.(gate|up)_proj$",
    r"^(?!.*mlp).*$",
    "model.layers.*.mlp.gate*",
    "[a-z]+.*[0-9]{2,}",
]


def parse_header(root: Path) -> None:
    read_header(root / "model.safetensors").tensors  # noqa: B018 - places are made when asked


def check(root: Path) -> None:
    verify_manifest(root)
