"""Log-probabilities of prompts, and the sampler's dummy run: `sampling.py MODEL RESULT.json`.

The result has the log-probabilities, how many rows of logits were asked for at once, and which
samplings the dummy run tried.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.v1.sample.sampler import Sampler

ROWS: list[int] = []
SAMPLED: list[dict[str, bool]] = []


def watch() -> None:
    """Note how many rows every call has, and what each sampling leaves out."""
    compute, forward = LlamaForCausalLM.compute_logits, Sampler.forward

    def counting(self: LlamaForCausalLM, hidden: torch.Tensor, *others: Any) -> Any:
        ROWS.append(hidden.shape[0])
        return compute(self, hidden, *others)

    def naming(self: Sampler, *, sampling_metadata: Any, **others: Any) -> Any:
        names = {"top_k": sampling_metadata.top_k, "top_p": sampling_metadata.top_p}
        on = {name: value is not None for name, value in names.items()}
        SAMPLED.append(on | {"penalties": not sampling_metadata.no_penalties})
        return forward(self, sampling_metadata=sampling_metadata, **others)

    LlamaForCausalLM.compute_logits = counting
    Sampler.forward = naming


def main() -> None:
    """Ask for a long and a short prompt at once, then run the dummy."""
    watch()
    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=150,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
    )
    prompts = [[3 + (7 * at) % 480 for at in range(count)] for count in (230, 9)]
    sampling = SamplingParams(temperature=0, max_tokens=2, detokenize=False, prompt_logprobs=3)
    ROWS.clear()
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], sampling)
    said = [
        [
            {token: each.logprob for token, each in place.items()}
            for place in output.prompt_logprobs[1:]
        ]
        for output in outputs
    ]
    rows = max(ROWS)
    SAMPLED.clear()
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    runner._dummy_sampler_run(torch.zeros(8, runner.model.config.hidden_size))
    result = {"rows": rows, "logprobs": said, "sampled": SAMPLED}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
