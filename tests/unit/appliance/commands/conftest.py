"""A folder with a configuration and a checkpoint of headers only, and the command run in it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from commands import Ended, run_command

HIDDEN, INTERMEDIATE, VOCABULARY, LAYERS = 256, 512, 1024, 2


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small dense Llama whose weights are holes in a sparse file."""
    folder = tmp_path / "model"
    folder.mkdir()
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        parts = {
            "self_attn.q_proj": (256, HIDDEN),
            "self_attn.k_proj": (128, HIDDEN),
            "self_attn.v_proj": (128, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 256),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    _write_sparse(folder / "model.safetensors", shapes)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return folder


def _write_sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, shape in shapes.items():
        size = 2
        for side in shape:
            size *= side
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with path.open("r+b") as stream:
        stream.truncate(8 + len(text) + end)


@pytest.fixture
def configure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> Callable[[str], Path]:
    """Write config/appliance.yaml for the checkpoint, with further sections, and go there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()

    def written(sections: str = "") -> Path:
        path = Path("config/appliance.yaml")
        path.write_text(f"version: 1\nmodel: {{path: {checkpoint}}}\n{sections}")
        return path

    written()
    return written


@pytest.fixture
def appliance(
    capsys: pytest.CaptureFixture[str], configure: Callable[[str], Path]
) -> Callable[..., Ended]:
    """Run one verb in the folder."""
    assert configure

    return partial(run_command, capsys)
