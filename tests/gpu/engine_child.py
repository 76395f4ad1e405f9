"""Runs one model through the real engine on this machine's GPUs: `engine_child.py JOB RESULT`.

A job is one model and the ways to run it, each an engine of its own; the result has the tokens of
every way, what the library was called for, and how far the dequantized FP32 twin is from them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from appliance.nvfp4.library import Library
from appliance.render.argv import NORM_OPS, OUR_OPS, capture_sizes

sys.path.append(str(Path(__file__).parent))
from engine_twin import FAR, Judgement, Twin

CALLS: Counter[str] = Counter()
MAX_NUM_SEQS = 16
CACHE_BYTES = 1 << 30


def count_calls() -> None:
    """Count every call of the kernel library of this process by its name."""
    name = "call" if hasattr(Library, "call") else "_call"
    plain = getattr(Library, name)

    def counted(self: Library, function: str, *arguments: object) -> None:
        CALLS[function] += 1
        plain(self, function, *arguments)

    setattr(Library, name, counted)


def arguments(job: dict[str, Any], way: dict[str, Any]) -> dict[str, Any]:
    """What the plan renders for such an engine, in the words of the offline class."""
    compilation: dict[str, Any] = {
        "mode": 0,
        "custom_ops": ["none", *(f"+{name}" for name in OUR_OPS)],
        "cudagraph_mode": "FULL_DECODE_ONLY" if way.get("graphs") else "NONE",
    }
    if way.get("graphs"):
        compilation["cudagraph_capture_sizes"] = list(capture_sizes(MAX_NUM_SEQS))
    tp, pp = way.get("tp", 1), way.get("pp", 1)
    state = {"mamba_ssm_cache_dtype": "float32"} if job["recurrent"] else {}
    return state | {
        "model": str(Path(job["model"]).with_name(way.get("folder", "model"))),
        "linear_backend": way.get("linear_backend", "auto"),
        "language_model_only": True,
        "quantization": way.get("quantization", "nvfp4"),
        "dtype": "float16",
        "max_model_len": job["max_model_len"],
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": way.get("step_tokens", 2048),
        "block_size": 16,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": way.get("prefix_caching", False),
        "enforce_eager": not way.get("graphs", False),
        "compilation_config": compilation,
        "ir_op_priority": NORM_OPS,
        "attention_config": {"backend": way.get("attention", "TRITON_ATTN")},
        "additional_config": {"nvfp4": {"weights": way.get("weights", "fused")}},
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "distributed_executor_backend": "mp" if tp * pp > 1 else "uni",
        "disable_custom_all_reduce": True,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "skip_tokenizer_init": True,
        "load_format": "safetensors",
    }


def generate(llm: LLM, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Greedy tokens, their log-probabilities, and the time that all of it took."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0
    )
    started = time.monotonic()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
    )
    seconds = time.monotonic() - started
    completions = [output.outputs[0] for output in outputs]
    found: list[list[float]] = []
    for completion in completions:
        chosen = zip(completion.token_ids, completion.logprobs or [], strict=True)
        found.append([float(each[token].logprob) for token, each in chosen])
    return {
        "tokens": [list(completion.token_ids) for completion in completions],
        "logprobs": found,
        "seconds": round(seconds, 3),
    }


def run_way(job: dict[str, Any], way: dict[str, Any]) -> dict[str, Any]:
    """Start one engine, ask it prompt by prompt and all at once, and stop it."""
    CALLS.clear()
    started = time.monotonic()
    llm = LLM(**arguments(job, way))
    result: dict[str, Any] = {"start_s": round(time.monotonic() - started, 1)}
    prompts, tokens = job["prompts"], job["tokens"]
    singles = [generate(llm, [prompt], tokens) for prompt in prompts]
    result["one"] = {
        "tokens": [single["tokens"][0] for single in singles],
        "logprobs": [single["logprobs"][0] for single in singles],
        "seconds": round(sum(single["seconds"] for single in singles), 3),
    }
    result["sixteen"] = generate(llm, prompts * 2, tokens)
    result["coarse"] = way.get("coarse", False)
    if job["name"] == "stack":
        result["read"] = read(llm, max(prompts, key=len))
    result["calls"] = dict(CALLS)
    if way.get("requests"):
        result["growth_bytes"] = growth(llm, prompts, way["requests"])
    del llm
    return result


def read(llm: LLM, prompt: list[int]) -> list[float]:
    """Log-probabilities that the engine holds of a prompt's tokens but the first."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    each = zip(prompt[1:], (output.prompt_logprobs or [])[1:], strict=True)
    return [float(said[token].logprob) for token, said in each if said is not None]


def growth(llm: LLM, prompts: list[list[int]], requests: int) -> int:
    """Bytes by which the allocated memory has grown over many requests."""
    generate(llm, prompts, 2)
    before = torch.cuda.memory_allocated()
    generate(llm, prompts * (requests // len(prompts)), 2)
    return torch.cuda.memory_allocated() - before


def twin_gaps(job: dict[str, Any], ways: dict[str, Any]) -> dict[str, Any]:
    """How far the answers of each way are from the twin's, place by place.

    A gap is what the twin's likeliest token has in log-probability above the engine's: 0 at every
    place means that the twin's own greedy answer is the same.
    """
    twin, lines = Twin(job["twin"]), {}
    for name, way in ways.items():
        asked = job["prompts"] + job["prompts"] * 2
        answers, logprobs = (
            [each for batch in ("one", "sixteen") for each in way.get(batch, {}).get(key, [])]
            for key in ("tokens", "logprobs")
        )
        judged = [
            twin.judge(prompt, answer, said)
            for prompt, answer, said in zip(asked, answers, logprobs, strict=False)
        ]
        gaps, differences = (
            [float(value) for each in judged for value in getattr(each, key)]
            for key in ("gaps", "differences")
        )
        lines[name] = {
            "places": len(gaps),
            "other_token": sum(gap > 0 for gap in gaps),
            "ties_broken_otherwise": sorted(
                {(tie.layer, tie.place, round(tie.margin, 7)) for e in judged for tie in e.flipped}
            ),
            "unexplained": unexplained(twin, asked, answers, logprobs, judged),
            "largest_gap": largest(gaps),
            "largest_logprob_difference": largest(differences),
        }
    return lines


def largest(values: list[float]) -> float:
    """The largest value, NaN if one is none: a plain `max` drops it wherever it is not first."""
    return float(torch.tensor(values, dtype=torch.float64).max()) if values else 0.0


def unexplained(
    twin: Twin,
    asked: list[list[int]],
    answers: list[list[int]],
    logprobs: list[list[float]],
    judged: list[Judgement],
) -> list[dict[str, Any]]:
    """Answers that are far from the twin: where, and which close choice of experts would do it."""
    found = []
    each = zip(asked, answers, logprobs, judged, strict=False)
    for number, (prompt, answer, said, judgement) in enumerate(each):
        if judgement.worst <= FAR:
            continue
        nearly = twin.nearly(prompt, answer, said)
        place = int(judgement.differences.argmax())
        found.append(
            {
                "answer": number,
                "place": place,
                "difference": judgement.worst,
                "nearly": nearly and (nearly.layer, nearly.place, round(nearly.margin, 7)),
            }
        )
    return found


def compiled_by_triton() -> list[str]:
    """Names of the kernels that Triton compiled in this process's own cache."""
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    return sorted({path.stem for path in cache.glob("*/*.json") if "__grp__" not in path.name})


def main() -> None:
    """Run every way of a job; one that fails leaves its reason, and the next begins."""
    job = json.loads(Path(sys.argv[1]).read_text())
    result: dict[str, Any] = {"name": job["name"], "ways": {}}
    count_calls()
    for way in job["ways"]:
        started = time.monotonic()
        try:
            found = run_way(job, way)
        except Exception as error:  # noqa: BLE001 - the reason is the result
            found = {"error": f"{type(error).__name__}: {error}"[-2000:]}
            traceback.print_exc()
        found["wall_s"] = round(time.monotonic() - started, 1)
        result["ways"][way["name"]] = found
        Path(sys.argv[2]).write_text(json.dumps(result))
        gc.collect()
        if way.get("tp", 1) * way.get("pp", 1) == 1:
            cleanup_dist_env_and_memory()
    result["triton"] = compiled_by_triton()
    if job.get("twin"):
        result["twin"] = twin_gaps(job, result["ways"])
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
