"""Calibration of experts: each is judged by the tokens that reach it."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from appliance.quantize.hooks import InputSums, stacked_parts
from appliance.quantize.job import Job, quantize
from appliance.quantize.settings import Calibration, settings_of

WIDTH, INNER, EXPERTS = 32, 16, 4


class Experts(torch.nn.Module):
    """The parts of transformers' expert modules that the sums rely on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gate_up_proj = torch.nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH))
        self.down_proj = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.act_fn = torch.nn.SiLU()

    def forward(self, hidden: torch.Tensor, _chosen: torch.Tensor) -> torch.Tensor:
        return hidden


@pytest.fixture
def layer() -> Any:
    made = torch.nn.Module()
    made.mlp = torch.nn.Module()
    made.mlp.experts = Experts()
    return made


def test_sums_of_experts_are_those_of_their_own_tokens(layer: Any) -> None:
    hidden = torch.randn(24, WIDTH)
    chosen = torch.stack([torch.arange(24) % 3, torch.full((24,), 3)], 1)[:, :2]
    chosen[5] = torch.tensor([0, 1])
    names = [
        f"mlp.experts.{e}.{leaf}" for e in range(EXPERTS) for leaf in ("gate_proj", "down_proj")
    ]
    watched = InputSums(layer, {name: name for name in names})

    with torch.inference_mode():
        layer.mlp.experts(hidden[:20], chosen[:20])
        watched.is_held_out = True
        layer.mlp.experts(hidden[20:], chosen[20:])
    watched.remove()

    experts = layer.mlp.experts
    expected = {name: [np.zeros((1, 1)), np.zeros((1, 1))] for name in names}
    for token in range(24):
        for expert in chosen[token].tolist():
            row = hidden[token].double().numpy()
            both = experts.gate_up_proj[expert].detach().double().numpy() @ row
            gate, up = both[:INNER], both[INNER:]
            inner = gate / (1 + np.exp(-gate)) * up
            for leaf, value in (("gate_proj", row), ("down_proj", inner)):
                kept = expected[f"mlp.experts.{expert}.{leaf}"]
                kept[token >= 20] = kept[token >= 20] + np.outer(value, value)
    for name, (seen, unseen) in expected.items():
        np.testing.assert_allclose(
            watched.sums[name].calibration.numpy(), seen, rtol=1e-3, atol=1e-3
        )
        np.testing.assert_allclose(
            watched.sums[name].held_out.numpy(), unseen, rtol=1e-3, atol=1e-3
        )


def test_stacked_parts_put_gate_rows_first() -> None:
    assert list(stacked_parts("mlp.experts.gate_up_proj", 2)) == [
        ("mlp.experts.0.gate_proj.weight", "mlp.experts.0.up_proj.weight"),
        ("mlp.experts.1.gate_proj.weight", "mlp.experts.1.up_proj.weight"),
    ]
    assert next(stacked_parts("mlp.experts.down_proj", 1)) == ("mlp.experts.0.down_proj.weight",)


@pytest.mark.slow
def test_calibrated_of_a_model_with_experts_judges_those_that_tokens_reach(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=WIDTH,
        intermediate_size=64,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=256,
        tie_word_embeddings=True,
    )
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "src")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: number for number, letter in enumerate(letters)}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(
        tmp_path / "src"
    )
    text = tmp_path / "text.txt"
    shutil.copy(__file__, text)

    report = quantize(
        Job(
            tmp_path / "src",
            tmp_path / "dst",
            settings_of(
                "calibrated", threads=1, error_limit=0.5, calibration=Calibration(text, 4096)
            ),
        ),
        io.StringIO(),
    )

    experts = {name: made for name, made in report["tensors"].items() if ".experts." in name}
    assert len(experts) == 3 * EXPERTS
    assert report["output_error"] < report["output_error_rtn"]
    assert any(made.get("output_error") for made in experts.values())
