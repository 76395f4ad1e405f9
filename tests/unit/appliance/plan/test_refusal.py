"""Plans that are refused: what does not suit the model, and what would fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning import HOST, Configure, Public, Tiny, refusal

from appliance.errors import ExitCode
from healthchecks.assumed import assumed_host


def test_context_beyond_the_model_is_refused(configure: Configure, tiny: Tiny) -> None:
    loaded = configure(model={"max_model_len": 4096})

    code, (fault,) = refusal(loaded, tiny(), assumed_host("1x16GiB"))

    assert (code, fault.code) == (ExitCode.CONFIG, "CONTEXT_TOO_LONG")


def test_hybrid_needs_cut_prompts_for_prefix_caching(configure: Configure, public: Public) -> None:
    loaded = configure(execution={"chunked_prefill": False})

    code, (fault,) = refusal(loaded, public("quasar-27b"), assumed_host("1x32GiB"))

    assert (code, fault.code) == (ExitCode.CONFIG, "CONFIG_CONFLICT")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"has_tokenizer": False}, "E_TOKENIZER_MISSING"),
    ],
    ids=str,
)
def test_checkpoint_that_cannot_be_served_is_refused(
    configure: Configure, tiny: Tiny, change: dict[str, object], code: str
) -> None:
    summary = replace(tiny(), **change)

    exit_code, faults = refusal(configure(), summary, assumed_host("1x16GiB"))

    assert exit_code == ExitCode.CHECKPOINT_UNSUPPORTED
    assert [fault.code for fault in faults] == [code]


def test_format_that_is_stated_must_be_there(configure: Configure, tiny: Tiny) -> None:
    loaded = configure(model={"format": "dense"})

    code, (fault,) = refusal(loaded, tiny(), assumed_host("1x16GiB"))

    assert (code, fault.code) == (ExitCode.CHECKPOINT_UNSUPPORTED, "E_FORMAT")


@pytest.mark.parametrize(
    ("sections", "host", "fix"),
    [
        ({}, "1x16GiB", "use 1x32GiB or 2x16GiB of V100"),
        (
            {"model": {"max_model_len": 262144}},
            "2x16GiB-nvlink",
            "set model.max_model_len: 131712, the longest that fits",
        ),
        ({"parallel": {"mode": "single"}}, "2x16GiB-nvlink", "set parallel.mode: auto"),
        (
            {"execution": {"weights": "dequantized"}},
            "1x32GiB",
            "set execution.weights: fused",
        ),
        (
            {"memory": {"gpu_memory_utilization": 0.6}},
            "1x32GiB",
            "set memory.gpu_memory_utilization: 0.9",
        ),
    ],
    ids=str,
)
def test_refusal_names_the_shortest_change(
    configure: Configure, public: Public, sections: dict[str, object], host: str, fix: str
) -> None:
    code, (fault,) = refusal(configure(**sections), public("quasar-27b"), assumed_host(host))

    assert (code, fault.code, fault.fix) == (ExitCode.DOES_NOT_FIT, "PLAN_DOES_NOT_FIT", fix)


def test_refusal_adds_up_the_tightest_card(configure: Configure, public: Public) -> None:
    _, (fault,) = refusal(configure(), public("quasar-27b"), assumed_host("1x16GiB"))

    assert fault.where == "gpu 0 (GPU-assumed-0)"
    assert fault.what.startswith("single: weights 17.51 GiB + activations")
    assert "14.20 GiB" in fault.what
    assert fault.value == "19.32 GiB"


def test_cpu_cache_below_one_sequence_is_refused(on_cpu: Configure, tiny: Tiny) -> None:
    summary = tiny(num_hidden_layers=100, head_dim=256, max_position_embeddings=32768)
    loaded = on_cpu(memory={"kv_cache_size": "1GiB"}, model={"max_model_len": 32768})

    code, (fault,) = refusal(loaded, summary, HOST)

    assert (code, fault.code) == (ExitCode.DOES_NOT_FIT, "PLAN_DOES_NOT_FIT")
    assert fault.where.endswith("memory.kv_cache_size")
    assert (fault.what, fault.value) == ("12.50 GiB for 32768 tokens", "1.00 GiB")
