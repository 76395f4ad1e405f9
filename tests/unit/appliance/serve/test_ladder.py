"""Which safer settings follow which cause."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from appliance.serve.diagnose import Diagnosis
from appliance.serve.diagnose_rules import RULES
from appliance.serve.ladder import Rung, Settings, next_rung

SettingsMaker = Callable[..., Settings]
CPU = {"execution": {"device": "cpu", "enforce_eager": True}}


def cause(code: str, **facts: str) -> Diagnosis:
    return Diagnosis(code, "what", "fix", ("evidence",), facts)


def climb(settings: Settings, diagnosis: Diagnosis) -> list[str]:
    """Return every rung for one cause that stays the same."""
    taken: list[str] = []
    while (rung := next_rung(settings, diagnosis, tuple(taken))) is not None:
        settings = rung.settings
        taken.append(rung.name)
        assert len(taken) < 30, taken
    return taken


def test_graph_fault_turns_graphs_off_first(settings: SettingsMaker) -> None:
    rung = next_rung(settings(), cause("GRAPH_OOM"), ())

    assert isinstance(rung, Rung)
    assert rung.name == "execution.enforce_eager=true"
    assert rung.settings.plan.execution.enforce_eager
    assert rung.settings.plan.decisions[-1].reason == "safer start after GRAPH_OOM: what"


def test_memory_fault_climbs_utilization_graphs_tokens_sequences_and_context(
    settings: SettingsMaker,
) -> None:
    assert climb(settings(), cause("CUDA_OOM")) == [
        "memory.gpu_memory_utilization=0.9",
        "memory.gpu_memory_utilization=0.88",
        "memory.gpu_memory_utilization=0.85",
        "memory.gpu_memory_utilization=0.8",
        "execution.enforce_eager=true",
        "memory.max_num_batched_tokens=1024",
        "memory.max_num_batched_tokens=512",
        "memory.max_num_seqs=8",
        "memory.max_num_seqs=4",
        "memory.max_num_seqs=2",
        "model.max_model_len=4096",
        "model.max_model_len=2048",
        "model.max_model_len=1024",
    ]


def test_short_cache_takes_the_engines_own_estimate_in_whole_blocks(
    settings: SettingsMaker,
) -> None:
    rung = next_rung(settings(), cause("KV_TOO_SMALL", estimated_max_model_len="4999"), ())

    assert rung is not None
    assert rung.settings.plan.model.max_model_len == 4992


def test_busy_gpu_lowers_the_utilization_below_what_is_free(settings: SettingsMaker) -> None:
    rung = next_rung(settings(), cause("GPU_BUSY", free_gib="13.8", total_gib="16.0"), ())

    assert rung is not None
    assert rung.settings.plan.memory.gpu_memory_utilization == 0.85


def test_gpu_that_is_nearly_full_has_no_rung(settings: SettingsMaker) -> None:
    assert next_rung(settings(), cause("GPU_BUSY", free_gib="2", total_gib="16"), ()) is None


def test_gpus_that_cannot_talk_lose_peer_access_and_then_graphs(settings: SettingsMaker) -> None:
    first = next_rung(settings(), cause("STALLED_COLLECTIVE"), ())
    assert first is not None
    second = next_rung(first.settings, cause("STALLED_COLLECTIVE"), (first.name,))

    assert first.settings.adjustments.env == {"NCCL_P2P_DISABLE": "1"}
    assert first.settings.plan.execution.custom_all_reduce is False
    assert second is not None
    assert second.name == "execution.enforce_eager=true"


def test_one_gpu_has_no_peer_to_lose(settings: SettingsMaker) -> None:
    single = settings(parallel={"kind": "single", "tensor_parallel": 1})

    assert climb(single, cause("NCCL")) == ["execution.enforce_eager=true"]


def test_cpu_engine_has_no_utilization(settings: SettingsMaker) -> None:
    assert all("utilization" not in name for name in climb(settings(**CPU), cause("CUDA_OOM")))


def test_without_chunked_prefill_a_step_keeps_holding_the_longest_prompt(
    settings: SettingsMaker,
) -> None:
    whole = settings(execution={"chunked_prefill": False}, model={"max_model_len": 2048})

    assert all("batched" not in name for name in climb(whole, cause("NO_KV_MEMORY")))


@pytest.mark.parametrize(
    "code",
    ["ENGINE_ARGUMENT", "CHECKPOINT_CORRUPT", "DISK_FULL", "GPU_ECC", "WRONG_MODEL", "HOST_OOM",
     "START_TIMEOUT", "QUANTIZATION_UNKNOWN", "NO_KERNEL_IMAGE"],
)  # fmt: skip
def test_cause_that_no_setting_cures_has_no_rung(settings: SettingsMaker, code: str) -> None:
    assert next_rung(settings(), cause(code), ()) is None


@pytest.mark.parametrize("code", sorted({rule.code for rule in RULES}))
def test_every_climb_ends(settings: SettingsMaker, code: str) -> None:
    names = climb(settings(), cause(code))

    assert len(names) == len(set(names))
