"""Prints the perplexity of checkpoints, dense or NVFP4, on the language reference inside Python.

python perplexity.py TOKENS DENSE [NVFP4 ...]: the first directory gives architecture and tokenizer,
weights of the others are decoded to FP32 and put in its place.
"""

from __future__ import annotations

import json
import math
import pydoc_data.topics
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

from appliance.checkpoint.tensors import TensorReader, open_tensors

WINDOW = 1024
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def decode(reader: TensorReader, module: str) -> np.ndarray:
    """FP32 weights [N, K] of one NVFP4 module."""
    packed = reader.array(f"{module}.weight_packed")
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    values = np.where(nibbles & 8, -1, 1).astype(np.float32) * E2M1[nibbles & 7]
    codes = torch.from_numpy(reader.array(f"{module}.weight_scale").copy())
    scales = codes.view(torch.float8_e4m3fn).float().numpy()
    divisor = reader.array(f"{module}.weight_global_scale")[0]
    return values * np.repeat(scales, 16, axis=1) / divisor


def load_nvfp4(model: torch.nn.Module, directory: Path) -> None:
    """Replace the linear weights of `model` by those of an NVFP4 checkpoint."""
    with open_tensors(directory) as reader, torch.no_grad():
        for name in reader.names():
            module, _, kind = name.rpartition(".")
            if kind == "weight_packed":
                decoded = torch.from_numpy(decode(reader, module))
                model.get_parameter(f"{module}.weight").copy_(decoded)


@torch.inference_mode()
def perplexity(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """exp of the mean negative log-likelihood of every token but the first of each window."""
    total = count = 0.0
    for window in tokens.split(WINDOW):
        logits = model(window[None]).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
        count += len(window) - 1
    return math.exp(total / count)


def main() -> None:
    """Run and print one JSON object: directory to perplexity."""
    limit, dense, *others = sys.argv[1:]
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    tokenizer = transformers.AutoTokenizer.from_pretrained(dense)
    tokens = tokenizer(text[: 8 * int(limit)], return_tensors="pt").input_ids[0][: int(limit)]
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    found = {dense: perplexity(model, tokens)}
    for directory in others:
        load_nvfp4(model, Path(directory))
        found[directory] = perplexity(model, tokens)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
