"""Mode `calibrated`: what GPTQ gains, and that a run that is cut goes on with the same bits."""

from __future__ import annotations

import argparse
import inspect
import io
import json
import logging
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from appliance.checkpoint.tensors import open_tensors
from appliance.checkpoint.writer import ShardWriter, TensorSpec
from appliance.errors import ApplianceError
from appliance.quantize import gptq
from appliance.quantize.job import Job, quantize
from appliance.quantize.native import Mode, divisor_of, encode
from appliance.quantize.settings import Calibration, settings_of

TOKENS = 4096
"""The fewest that the verb takes; docs/quantize.md has the figures of more."""

DOCUMENTED = (argparse, logging, subprocess)
"""Modules that begin with prose; to gather the whole library's takes seconds."""

WORDS = "the model reads a text and what it sees decides how its weights are rounded"


def correlated(tokens: int, width: int, seed: int) -> Any:
    """Inputs of few directions and some noise, as a language model's are."""
    mix = np.random.default_rng(0).standard_normal((width // 4, width))
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((tokens, width // 4)) @ mix + 0.3 * rng.standard_normal(
        (tokens, width)
    )
    return torch.from_numpy(rows.astype(np.float32))


def moments_of(width: int) -> gptq.Moments:
    seen, unseen = correlated(4096, width, 1), correlated(1024, width, 2)
    return gptq.Moments(seen.t() @ seen, unseen.t() @ unseen)


def matrix(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(5).normal(0, 0.02, (rows, columns)).astype(np.float32)


def write_text(path: Path, words: int = 1500) -> Path:
    chosen = random.Random(1).choices(WORDS.split(), k=words)  # noqa: S311 - the same text every time
    path.write_text(" ".join(chosen))
    return path


@pytest.fixture
def readable_llama(llama: Any) -> Any:
    """The small Llama with what transformers wants to run it."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    llama.extra = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}),
    }
    width = llama.config["hidden_size"]
    llama.config |= {
        "intermediate_size": 2 * width,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(letters),
    }
    rng = np.random.default_rng(3)
    llama.tensors["model.embed_tokens.weight"] = rng.normal(0, 1, (len(letters), width)).astype(
        np.float32
    )
    return llama


def first_layers(model: Path, target: Path, layers: int) -> None:
    """Copy a model without its later layers."""
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    with open_tensors(model) as reader:
        kept = [
            reader.entry(name)
            for name in reader.names()
            if ".layers." not in name or int(name.split(".")[2]) < layers
        ]
        specs = [TensorSpec(entry.name, entry.dtype, entry.shape) for entry in kept]
        with ShardWriter(target / "model.safetensors", specs) as writer:
            for spec in specs:
                writer.write(spec.name, reader.array(spec.name))


def run(
    source: Path, target: Path, text: Path, stream: Any = None, **options: Any
) -> dict[str, Any]:
    calibration = Calibration(text, TOKENS)
    settings = settings_of("calibrated", threads=1, calibration=calibration, **options)
    return quantize(Job(source, target, settings), stream or io.StringIO())


def test_gptq_halves_the_output_error_on_inputs_it_has_not_seen() -> None:
    weights, moments = matrix(96, 256), moments_of(256)
    order = gptq.order_of(moments.calibration)

    done = gptq.calibrate(
        weights, order, moments, divisor=divisor_of(float(np.abs(weights).max())), threads=1
    )

    assert done.output_error < 0.5 * done.output_error_rtn


def test_gptq_with_independent_equal_inputs_gives_what_fast_gives() -> None:
    weights = matrix(33, 64)
    moments = gptq.Moments(torch.eye(64), torch.eye(64))
    divisor = divisor_of(float(np.abs(weights).max()))

    done = gptq.calibrate(
        weights, gptq.order_of(moments.calibration), moments, divisor=divisor, threads=1
    )

    fast = encode(weights, "F32", divisor=divisor, mode=Mode.FAST, threads=1)
    np.testing.assert_array_equal(done.encoded.scales, fast.scales)
    np.testing.assert_array_equal(gptq.decode(done.encoded, divisor), gptq.decode(fast, divisor))
    assert done.encoded.squared_error == pytest.approx(fast.squared_error, rel=1e-4)


def test_order_is_a_factor_of_the_inverse_of_the_damped_hessian() -> None:
    hessian = moments_of(64).calibration
    hessian[3] = hessian[:, 3] = 0.0  # an input that never fires

    order = gptq.order_of(hessian)

    damped = hessian.double()
    mean = float(hessian.diagonal().mean())
    damped.diagonal().add_(0.01 * mean)
    damped[3, 3] = mean
    inverse = torch.linalg.inv(damped)[order.columns][:, order.columns]
    product = order.factor.double().t() @ order.factor.double()
    torch.testing.assert_close(product, inverse, rtol=1e-4, atol=1e-9)
    assert (order.factor.tril(-1) == 0).all()
    assert (order.importance > 0).all()


@pytest.mark.slow
def test_calibrated_checkpoint_holds_one_divisor_a_site_and_reports_the_gain(
    readable_llama: Any, tmp_path: Path
) -> None:
    source = readable_llama.write(tmp_path / "src")

    report = run(source, tmp_path / "dst", write_text(tmp_path / "text.txt"))

    with open_tensors(tmp_path / "dst") as reader:
        prefix = "model.layers.1.self_attn"
        divisors = {float(reader.array(f"{prefix}.{x}_proj.weight_global_scale")[0]) for x in "qkv"}
    assert len(divisors) == 1
    assert report["output_error"] < report["output_error_rtn"]
    assert len(report["tensors"]) == 14
    assert (tmp_path / "dst/quantize_report.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "dst/.quantize").exists()


@pytest.mark.slow
def test_calibrated_cut_after_any_layer_goes_on_with_the_same_bits(
    readable_llama: Any, tmp_path: Path, read_tree: Callable[[Path], dict[str, bytes]]
) -> None:
    class Cut(io.StringIO):
        """A stream that ends the run when the n-th line is written."""

        def __init__(self, lines: int) -> None:
            super().__init__()
            self.left = lines

        def write(self, text: str) -> int:
            self.left -= 1
            if self.left < 0:
                raise InterruptedError
            return super().write(text)

    source, text = readable_llama.write(tmp_path / "src"), write_text(tmp_path / "text.txt")
    run(source, tmp_path / "whole", text)
    for lines in (0, 1):
        with pytest.raises(InterruptedError):
            run(source, tmp_path / "dst", text, Cut(lines))
        assert not (tmp_path / "dst").exists()

    stream = io.StringIO()
    run(source, tmp_path / "dst", text, stream)

    assert "quantize.layer" not in stream.getvalue()
    assert read_tree(tmp_path / "dst") == read_tree(tmp_path / "whole")


@pytest.mark.slow
def test_calibrated_killed_leaves_no_output_and_a_rerun_finishes(
    readable_llama: Any, tmp_path: Path, read_tree: Callable[[Path], dict[str, bytes]]
) -> None:
    source, text = readable_llama.write(tmp_path / "src"), write_text(tmp_path / "text.txt")
    words = ["quantize", str(source), str(tmp_path / "dst"), "--mode", "calibrated"]
    words += ["--calibration", str(text), "--calibration-tokens", str(TOKENS), "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "appliance", *words], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    while "quantize.layer" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (tmp_path / "dst").exists()

    run(source, tmp_path / "dst", text)

    run(source, tmp_path / "whole", text)
    assert read_tree(tmp_path / "dst") == read_tree(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.serial
def test_calibrated_halves_the_held_out_error_of_the_first_layer_of_the_demo_model(
    demo_model: Path, tmp_path: Path
) -> None:
    # Its first layer: all thirty take minutes, and their figures are in docs/quantize.md.
    source = tmp_path / "src"
    first_layers(demo_model, source, 1)
    sources = [inspect.getsource(module)[:12_000] for module in DOCUMENTED]
    (tmp_path / "text.txt").write_text("\n\n".join(sources))

    report = run(source, tmp_path / "dst", tmp_path / "text.txt")

    assert report["below_rtn"] > 0.5


@pytest.mark.parametrize("text", ["short", "absent"])
def test_calibrated_without_enough_text_is_refused_before_anything_is_written(
    readable_llama: Any, tmp_path: Path, text: str
) -> None:
    source, path = readable_llama.write(tmp_path / "src"), tmp_path / "text.txt"
    if text == "short":
        path.write_text("too short")

    with pytest.raises(ApplianceError) as caught:
        run(source, tmp_path / "dst", path)

    assert caught.value.exit_code == 2
    assert caught.value.faults[0].code == "QUANT_CALIBRATION"
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("name", "exit_code", "code"),
    [
        ("model.layers.0.input_layernorm.weight", 2, "QUANT_CALIBRATION"),
        ("model.layers.0.self_attn.q_proj.weight", 31, "QUANT_NOT_FINITE"),
    ],
)
def test_calibrated_of_a_model_whose_nan_is_allowed_names_the_place(
    readable_llama: Any, tmp_path: Path, name: str, exit_code: int, code: str
) -> None:
    readable_llama.tensors[name].flat[3] = np.nan
    source = readable_llama.write(tmp_path / "src")

    text = write_text(tmp_path / "text.txt")
    with pytest.raises(ApplianceError) as caught:
        run(source, tmp_path / "dst", text, allow_not_finite=True)

    assert (caught.value.exit_code, caught.value.faults[0].code) == (exit_code, code)
    assert not (tmp_path / "dst").exists()


def test_calibrated_of_a_text_with_tokens_that_the_model_lacks_is_refused(
    readable_llama: Any, tmp_path: Path
) -> None:
    embedding = readable_llama.tensors["model.embed_tokens.weight"]
    readable_llama.tensors["model.embed_tokens.weight"] = embedding[:40]
    readable_llama.config["vocab_size"] = 40
    source = readable_llama.write(tmp_path / "src")

    with pytest.raises(ApplianceError) as caught:
        run(source, tmp_path / "dst", write_text(tmp_path / "text.txt"))

    assert caught.value.faults[0].code == "QUANT_CALIBRATION"


@pytest.mark.parametrize(
    "words", [("--mode", "calibrated"), ("--calibration", "text"), ("--calibration-tokens", "7")]
)
def test_quantize_with_half_of_a_calibration_is_a_usage_error(
    tmp_path: Path, cli: Callable[..., subprocess.CompletedProcess[str]], words: tuple[str, str]
) -> None:
    done = cli("quantize", tmp_path, tmp_path / "dst", *words)

    assert done.returncode == 2
    assert not (tmp_path / "dst.part").exists()
