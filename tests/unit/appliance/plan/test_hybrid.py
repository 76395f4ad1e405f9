"""Hybrid models: what recurrent layers need of an engine, on GPUs and on the CPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from planning import Configure, Public

from appliance.checkpoint.read import summarize
from appliance.checkpoint.summary import CheckpointSummary
from appliance.errors import ApplianceError, ExitCode
from appliance.plan.attention import CONV_WIDTHS, RECURRENT_SIZES, attention_backend
from appliance.plan.planner import make_plan
from appliance.plan.validated import RECURRENT, ROWS, unvalidated
from appliance.render.argv import vllm_argv
from healthchecks.assumed import assumed_host

HYBRID: dict[str, object] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attn_output_gate": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 500,
    "max_position_embeddings": 512,
}


@pytest.fixture
def hybrid(tmp_path: Path, hollow: ModuleType) -> CheckpointSummary:
    """Summary of a tiny hybrid."""
    tensors = hollow.quantized(hollow.model(HYBRID))
    return summarize(hollow.write(tmp_path / "hybrid", hollow.compressed(HYBRID), tensors))


def test_cpu_engine_is_planned_for_a_hybrid(on_cpu: Configure, hybrid: CheckpointSummary) -> None:
    plan = make_plan(on_cpu(), hybrid, assumed_host("1x16GiB"))

    words = [word for item in vllm_argv(plan) for word in item.words]
    assert {"--dtype=float32", "--mamba-ssm-cache-dtype=float32"} <= set(words)
    assert not any("recurrent layers" in warning for warning in plan.warnings)


def test_plan_for_gpus_says_that_none_has_run_recurrent_layers(
    configure: Configure, public: Public
) -> None:
    plan = make_plan(configure(), public("quasar-27b"), assumed_host("1x32GiB"))

    assert plan.execution.attention_backend == "CUSTOM"
    (warning,) = [warning for warning in plan.warnings if "recurrent layers" in warning]
    assert warning.startswith("48 recurrent layers ")


@pytest.mark.parametrize(
    ("sizes", "place"),
    [
        ((96, 64, 4), "linear_key_head_dim"),
        ((64, 256, 4), "linear_key_head_dim"),
        ((128, 128, 5), "linear_conv_kernel_dim"),
    ],
)
def test_recurrent_layers_that_no_kernel_has_are_refused(
    hybrid: CheckpointSummary, sizes: tuple[int, int, int], place: str
) -> None:
    with pytest.raises(ApplianceError) as caught:
        attention_backend(replace(hybrid.geometry, recurrent_sizes=sizes))

    assert caught.value.exit_code == ExitCode.CHECKPOINT_UNSUPPORTED
    assert [(fault.code, fault.where) for fault in caught.value.faults] == [("NO_KERNEL", place)]


def test_plan_and_library_have_the_same_recurrent_layers() -> None:
    header = (Path(__file__).parents[4] / "kernels/include/nvfp4_gdn.h").read_text()

    for name in "kv":
        stated = re.search(rf"int64_t {name}_dim;\s*/\* (\d+) or (\d+);", header)
        assert stated is not None
        assert tuple(map(int, stated.groups())) == RECURRENT_SIZES
    widths = re.search(r"int32_t width;\s*/\* ([\d, ]+) \*/", header)
    assert widths is not None
    assert tuple(map(int, widths[1].split(","))) == CONV_WIDTHS


def test_more_sequences_than_blocks_are_served_without_graphs(
    configure: Configure, public: Public
) -> None:
    plan = make_plan(
        configure(memory={"max_num_seqs": 400}), public("quasar-27b"), assumed_host("2x16GiB")
    )

    assert plan.execution.enforce_eager


def test_more_sequences_than_blocks_are_refused_where_graphs_are_asked_for(
    configure: Configure, public: Public
) -> None:
    loaded = configure(memory={"max_num_seqs": 340}, execution={"enforce_eager": False})

    with pytest.raises(ApplianceError) as caught:
        make_plan(loaded, public("quasar-27b"), assumed_host("2x16GiB"))

    (fault,) = caught.value.faults
    assert (caught.value.exit_code, fault.code) == (ExitCode.DOES_NOT_FIT, "STATE_BLOCKS")
    most = int(fault.fix.split()[3])
    fewer = configure(memory={"max_num_seqs": most}, execution={"enforce_eager": False})
    assert not make_plan(
        fewer, public("quasar-27b"), assumed_host("2x16GiB")
    ).execution.enforce_eager


def test_recurrent_layers_must_have_been_run_on_the_kind_of_gpu(
    configure: Configure, hybrid: CheckpointSummary
) -> None:
    host = assumed_host("1x16GiB")
    hopper = replace(host, gpus=tuple(replace(g, compute_capability=(9, 0)) for g in host.gpus))
    plan = make_plan(configure(), hybrid, hopper)
    without = [replace(row, features=row.features - {RECURRENT}) for row in ROWS]

    with pytest.raises(ApplianceError, match=r"NOT_VALIDATED.*sm_90 .*recurrent"):
        unvalidated(configure(), "nvfp4", plan.execution, [(9, 0)], recurrent=True, rows=without)

    assert plan.model.recurrent
    assert not any("nobody ran" in warning for warning in plan.warnings)
