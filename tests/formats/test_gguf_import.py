"""NVFP4 of a GGUF file stays NVFP4, value for value, and odd files end in a fault."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from appliance.checkpoint.gguf import import_gguf
from appliance.checkpoint.identity import identify
from appliance.checkpoint.read import summarize
from appliance.checkpoint.tensors import open_tensors
from appliance.errors import ApplianceError

NVFP4 = gguf.GGMLQuantizationType.NVFP4
HIDDEN, WIDTH = 64, 128
LAYER = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (WIDTH, HIDDEN),
    "ffn_up": (WIDTH, HIDDEN),
    "ffn_down": (HIDDEN, WIDTH),
}
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEADS = {"attn_q": 4, "attn_k": 2}


def blocks(generator: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Return super-blocks of random codes, without the negative zero that the package loses."""
    legal = np.array([code for code in range(16) if code != 8], np.uint8)
    nibbles = generator.choice(legal, (rows, columns // 64, 32, 2))
    scales = generator.integers(0, 0x58, (rows, columns // 64, 4), dtype=np.uint8)
    data = nibbles[..., 0] | (nibbles[..., 1] << 4)
    return np.concatenate([scales, data], axis=-1).reshape(rows, -1).astype(np.uint8)


class File:
    """A GGUF file of one layer, and the values that its tensors stand for."""

    def __init__(self) -> None:
        generator = np.random.default_rng(11)
        self.packed = {name: blocks(generator, *shape) for name, shape in LAYER.items()}
        self.factors = {name: 0.001 * (at + 1) for at, name in enumerate(LAYER)}
        self.spelling = "blk.0.{}.scale"
        self.dense: set[str] = set()

    def values(self, name: str) -> np.ndarray:
        """Return the exact values in Hugging Face's row order."""
        factor = np.float32(self.factors.get(name, 1.0))
        exact = dequantize(self.packed[name], NVFP4).astype(np.float64) * np.float64(factor)
        rows = exact.astype(np.float32)
        if name in HEADS:
            pairs = rows.reshape(HEADS[name], -1, 2, rows.shape[1])
            rows = pairs.swapaxes(1, 2).reshape(rows.shape)
        return rows

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(64)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(1)
        writer.add_feed_forward_length(WIDTH)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "b", "ab", "</s>"])
        writer.add_token_types([1, 1, 1, 3])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(3)
        for name, blocks in self.packed.items():
            if name in self.dense:
                writer.add_tensor(f"blk.0.{name}.weight", np.zeros(LAYER[name], np.float16))
                continue
            writer.add_tensor(f"blk.0.{name}.weight", blocks, raw_dtype=NVFP4)
            if name in self.factors:
                scale = np.array([self.factors[name]], np.float32)
                writer.add_tensor(self.spelling.format(name), scale)
                writer.add_tensor(f"blk.0.{name}.input_scale", scale)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.0.{name}.weight", np.ones(HIDDEN, np.float32))
        writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
        writer.add_tensor("token_embd.weight", np.ones((4, HIDDEN), np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def imported(made: File, root: Path) -> Path:
    import_gguf(made.write(root / "model.gguf"), root / "out")
    return root / "out"


@pytest.mark.parametrize("spelling", ["blk.0.{}.scale", "blk.0.{}.weight.scale"])
def test_nvfp4_of_a_gguf_file_keeps_every_value(tmp_path: Path, spelling: str) -> None:
    made = File()
    made.spelling = spelling

    root = imported(made, tmp_path)

    summary = summarize(root)
    assert (summary.format, summary.producer, summary.group_size) == ("nvfp4", "modelopt", 16)
    modules = identify(root).modules
    for name, target in NAMES.items():
        expected = made.values(name)
        found = modules[f"model.layers.0.{target}"]
        assert found.shape == expected.shape
        assert found.total == pytest.approx(float(expected.sum(dtype=np.float64)), abs=1e-9)
    assert modules.keys() == {f"model.layers.0.{target}" for target in NAMES.values()}


def test_values_are_bit_equal_to_the_packages(tmp_path: Path) -> None:
    import hashlib  # noqa: PLC0415 - this test only

    made = File()

    modules = identify(imported(made, tmp_path)).modules

    for name, target in NAMES.items():
        digest = hashlib.sha256(made.values(name).tobytes()).hexdigest()
        assert modules[f"model.layers.0.{target}"].sha256 == digest


def test_file_without_multipliers_stands_for_one(tmp_path: Path) -> None:
    made = File()
    made.factors = {}

    with open_tensors(imported(made, tmp_path)) as reader:
        factor = reader.array("model.layers.0.mlp.down_proj.weight_scale_2")

    assert factor == np.float32(1)


def test_site_with_one_part_of_another_type_is_decoded(tmp_path: Path) -> None:
    made = File()
    made.dense = {"attn_k"}

    root = imported(made, tmp_path)

    modules = identify(root).modules
    assert {name.rpartition(".")[2] for name in modules} == {
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    with open_tensors(root) as reader:
        query = reader.array("model.layers.0.self_attn.q_proj.weight")
    np.testing.assert_array_equal(query, made.values("attn_q").astype(np.float16))


def spoil_scale(made: File) -> None:
    made.packed["ffn_down"][0, 0] |= 0x80


def spoil_factor(made: File) -> None:
    made.factors["ffn_down"] = float("nan")


@pytest.mark.parametrize(
    ("spoil", "code"), [(spoil_scale, "E_SCALE_NEGATIVE"), (spoil_factor, "E_GLOBAL_INVALID")]
)
def test_scales_that_no_kernel_may_see_are_refused(
    tmp_path: Path, spoil: Callable[[Any], None], code: str
) -> None:
    made = File()
    spoil(made)

    with pytest.raises(ApplianceError) as caught:
        imported(made, tmp_path)

    assert [fault.code for fault in caught.value.faults] == [code]


@pytest.mark.parametrize("kind", [4, 6, 8, 12])
def test_array_longer_than_the_file_is_refused_at_once(tmp_path: Path, kind: int) -> None:
    key = b"general.architecture"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    field = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, kind, 2**40)
    path = tmp_path / "long.gguf"
    path.write_bytes(head + field + bytes(64))
    begun = time.process_time()

    with pytest.raises(ApplianceError) as caught:
        import_gguf(path, tmp_path / "out")

    assert [fault.code for fault in caught.value.faults] == ["GGUF_UNREADABLE"]
    assert time.process_time() - begun < 1
