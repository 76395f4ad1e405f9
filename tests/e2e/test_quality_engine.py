"""`appliance quality` over vLLM itself, held against the decoded weights in torch."""

from __future__ import annotations

import pydoc_data.topics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from appliance.quality.measure import read_text
from appliance.quality.measurement import Measurement, load_measurement

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Running

    Start = Callable[..., Running]

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LOAD_S = 400.0
SIZES = {"letters": 300, "pieces": 4}


def appliance(*words: str | Path) -> None:
    command = (sys.executable, "-m", "appliance", *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


@torch.inference_mode()
def largest_difference(found: Measurement, pieces: list[list[int]], model: Any) -> float:
    """Largest difference of a token's logarithm between the server and torch."""
    worst = 0.0
    for window, piece in zip(found.windows, pieces, strict=True):
        assert tuple(piece[1:]) == window.tokens
        tokens = torch.tensor([piece])
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
        ours = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
        worst = max(worst, float((ours - torch.tensor(window.logprobs)).abs().max()))
    return worst


def test_quality_of_the_served_model_is_that_of_its_decoded_weights(
    start_engine: Start, demo_model: Path, tmp_path: Path
) -> None:
    running = start_engine()
    topics = pydoc_data.topics.topics
    text = tmp_path / "text.txt"
    text.write_text("\n".join(topics[name] for name in sorted(topics))[:4000])
    running.wait_for("ready", 200, LOAD_S)
    running.family()
    url = f"http://127.0.0.1:{running.port}"

    appliance(
        *("quality", "--url", url, "--text", text, "--out", tmp_path / "out"),
        *("--letters", str(SIZES["letters"]), "--pieces", str(SIZES["pieces"])),
    )
    running.stop()

    found = load_measurement(tmp_path / "out/measurement.json")
    appliance("convert", demo_model, tmp_path / "dense", "--to", "fp16")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "dense")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", dtype=torch.float32
    )
    pieces = [tokenizer(piece)["input_ids"] for piece in read_text(text, **SIZES).pieces]
    assert found.tokens > 200
    assert 2 < found.perplexity < 200  # short pieces leave much to guess
    assert largest_difference(found, pieces, model) < 0.1
