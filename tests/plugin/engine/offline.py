"""Runs checkpoints through the real engine without a server: one process, many engines.

Usage: offline.py JOBS.json RESULTS.json

A job is {"name", "model", "tp", "prompts": [[token ids]], "tokens", "twin": directory or null}, and
may have "options" of the engine.
Its result has the greedy tokens of the engine, those that the twin gives in plain transformers, and
the bytes that each rank holds; or the error that ended the engine.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "worker_extension_cls": "held.HeldBytes",
}


def twin_tokens(job: dict[str, Any], generated: list[list[int]]) -> list[list[int]]:
    """Return what the dequantized FP32 model in plain transformers says after each prefix.

    One pass over prompt and answer gives the likeliest token at every place. Where all are the
    engine's, the twin's own greedy answer is the same, token by token.
    """
    model = AutoModelForCausalLM.from_pretrained(job["twin"], dtype=torch.float32)
    result: list[list[int]] = []
    with torch.inference_mode():
        for prompt, answer in zip(job["prompts"], generated, strict=True):
            logits = model(torch.tensor([prompt + answer[:-1]])).logits[0]
            result.append(logits[len(prompt) - 1 :].argmax(dim=-1).tolist())
    return result


def engine_result(job: dict[str, Any]) -> dict[str, Any]:
    """Start one engine, generate greedily, and stop it."""
    single = {"distributed_executor_backend": "uni"} if job["tp"] == 1 else {}
    llm = LLM(
        model=job["model"],
        quantization=job.get("quantization"),
        tensor_parallel_size=job["tp"],
        dtype=job.get("dtype", "float32"),
        additional_config=job.get("additional_config", {}),
        **(OPTIONS | single | job.get("options", {})),
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "ranks": llm.collective_rpc("held_bytes"),
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job; an engine that refuses its checkpoint gives its message as the result."""
    result: dict[str, Any] = {"name": job["name"]}
    try:
        result |= engine_result(job)
    except Exception as error:  # noqa: BLE001 - the message is the result
        result["error"] = f"{type(error).__name__}: {error}"
    gc.collect()
    if job["tp"] == 1:
        cleanup_dist_env_and_memory()
    if job.get("twin") and "tokens" in result:
        result["twin"] = twin_tokens(job, result["tokens"])
    return result


def main() -> None:
    """Run every job in order and write all results."""
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([run(job) for job in jobs]))


if __name__ == "__main__":
    main()
