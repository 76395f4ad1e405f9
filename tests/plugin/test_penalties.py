"""What a step with penalties takes of memory, which the plan counts."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from appliance.plan.estimates import PENALTY_BYTES
from appliance.vllm_plugin import engine_ops

SEQUENCES, VOCABULARY = 16, 50_000


def peak_bytes(sampling: profile) -> int:
    """The most that was allocated at once."""
    assert sampling.profiler is not None
    events = [e for e in sampling.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while vLLM is imported
def test_plan_counts_what_a_step_with_penalties_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops  # noqa: PLC0415 - imported where its warnings are let pass
    from vllm.model_executor.layers.utils import apply_penalties  # noqa: PLC0415 - likewise

    # As on a GPU, where vLLM calls the operation of its extension.
    called = engine_ops.apply_repetition_penalties
    monkeypatch.setattr(_custom_ops, "apply_repetition_penalties", called)
    logits = torch.randn(SEQUENCES, VOCABULARY)
    prompt = torch.full((SEQUENCES, 1), VOCABULARY)
    answer = torch.empty((SEQUENCES, 0), dtype=torch.int64)
    penalty = torch.full((SEQUENCES,), 0.5)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as sampling:
        apply_penalties(logits, prompt, answer, penalty, penalty, penalty)

    taken = peak_bytes(sampling) / (SEQUENCES * VOCABULARY)
    assert taken == pytest.approx(PENALTY_BYTES, abs=0.1)
