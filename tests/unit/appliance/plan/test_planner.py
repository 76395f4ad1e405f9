"""The whole plan: how the model is cut, and what every auto became."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning import HOST, Configure, Public, Tiny, refusal

from appliance.errors import ExitCode
from appliance.plan.launch_plan import LaunchPlan
from appliance.plan.planner import make_plan
from appliance.units import GIB
from healthchecks.assumed import assumed_host
from healthchecks.facts import HostFacts


def decision(plan: LaunchPlan, key: str) -> tuple[str, str]:
    return next((each.value, each.reason) for each in plan.decisions if each.key == key)


def test_cpu_engine_decodes_to_fp32_and_takes_whole_gib(on_cpu: Configure, tiny: Tiny) -> None:
    plan = make_plan(on_cpu(), tiny(), HOST)

    assert (plan.execution.device, plan.execution.dtype) == ("cpu", "float32")
    assert (plan.execution.weights, plan.execution.enforce_eager) == ("dequantized", True)
    assert (plan.parallel.kind, plan.parallel.gpus) == ("single", ())
    assert plan.memory.kv_cache_bytes == GIB
    assert plan.model.max_model_len == 2048
    assert plan.execution.attention_backend is None


def test_cpu_cache_grows_with_what_is_asked(on_cpu: Configure, tiny: Tiny) -> None:
    summary = tiny(num_hidden_layers=100, head_dim=64)
    token = summary.geometry.kv_bytes_per_token(4)

    plan = make_plan(on_cpu(), summary, HOST)

    assert plan.memory.kv_cache_bytes == -(-16 * 2048 * token // GIB) * GIB
    assert decision(plan, "memory.kv_cache_size")[0] == f"{plan.memory.kv_cache_bytes // GIB}GiB"


def test_cpu_ranks_share_cache_and_weights(on_cpu: Configure, tiny: Tiny) -> None:
    loaded = on_cpu(parallel={"cpu_ranks": 2}, memory={"kv_cache_size": "4GiB"})

    plan = make_plan(loaded, tiny(), HOST)

    assert (plan.parallel.kind, plan.parallel.tensor_parallel) == ("tensor", 2)
    assert plan.memory.kv_cache_bytes == 4 * GIB
    assert len(plan.memory.ranks) == 2
    assert plan.memory.ranks[0].bytes_of("kv_cache") <= 2 * GIB


def test_cpu_cache_shrinks_to_the_host(on_cpu: Configure, tiny: Tiny) -> None:
    summary = tiny(num_hidden_layers=100, head_dim=64)
    small = HostFacts(memory_total_bytes=4 * GIB)

    plan = make_plan(on_cpu(), summary, small)

    assert plan.memory.ranks[0].used_bytes <= 4 * GIB
    assert plan.memory.kv_cache_bytes == 2 * GIB
    assert any("max_num_seqs" in warning for warning in plan.warnings)


def test_cpu_host_that_is_too_small_is_refused(on_cpu: Configure, tiny: Tiny) -> None:
    loaded = on_cpu(memory={"kv_cache_size": "8GiB"})

    code, (fault,) = refusal(loaded, tiny(), HostFacts(memory_total_bytes=2 * GIB))

    assert (code, fault.code) == (ExitCode.DOES_NOT_FIT, "PLAN_DOES_NOT_FIT")
    assert fault.where == "cpu rank 0"


def test_rc_039_heads_that_do_not_divide_are_refused_with_the_pairs_that_do(
    on_cpu: Configure, tiny: Tiny
) -> None:
    summary = tiny(num_attention_heads=9, num_key_value_heads=3, head_dim=16)

    code, faults = refusal(on_cpu(parallel={"cpu_ranks": 2}), summary, HOST)

    assert code == ExitCode.CONFIG
    assert {fault.code for fault in faults} == {"TP_INVALID", "E_TP_GROUP"}
    assert "(1, 1), (1, 2)" in faults[0].fix


@pytest.mark.parametrize(
    ("model", "host", "kind"),
    [
        ("qwen2.5-7b", "1x16GiB", "single"),
        ("qwen2.5-7b", "2x16GiB-nvlink", "single"),
        ("qwen2.5-14b", "2x16GiB", "pipeline"),
        ("qwen2.5-14b", "2x16GiB-nvlink", "tensor"),
        ("qwen2.5-14b", "2x16GiB-p2p", "tensor"),
        ("qwen2.5-14b", "1x32GiB", "single"),
        ("quasar-27b", "1x32GiB", "single"),
        ("quasar-27b", "2x16GiB", "pipeline"),
        ("quasar-27b", "2x16GiB-nvlink", "tensor"),
    ],
)
def test_mode_follows_fit_and_link(
    configure: Configure, public: Public, model: str, host: str, kind: str
) -> None:
    plan = make_plan(configure(), public(model), assumed_host(host))

    assert plan.parallel.kind == kind
    for budget in plan.memory.ranks:
        assert budget.used_bytes <= budget.usable_bytes


@pytest.mark.parametrize(
    ("functional", "kind"), [("ok", "tensor"), ("hang", "pipeline"), ("mismatch", "pipeline")]
)
def test_copy_that_was_tried_outweighs_the_drivers_word(
    configure: Configure, public: Public, functional: str, kind: str
) -> None:
    host = assumed_host("2x16GiB-nvlink")
    tried = replace(host, pairs=(replace(host.pairs[0], functional=functional),))

    assert make_plan(configure(), public("qwen2.5-14b"), tried).parallel.kind == kind


def test_p2p_policy_off_leaves_tensor_parallelism_aside(
    configure: Configure, public: Public
) -> None:
    loaded = configure(gate={"p2p": {"policy": "off"}})

    plan = make_plan(loaded, public("qwen2.5-14b"), assumed_host("2x16GiB-nvlink"))

    assert plan.parallel.kind == "pipeline"


def test_mode_that_is_asked_for_is_taken(configure: Configure, public: Public) -> None:
    loaded = configure(parallel={"mode": "tensor"})

    plan = make_plan(loaded, public("qwen2.5-7b"), assumed_host("2x16GiB"))

    assert plan.parallel.kind == "tensor"
    assert any("way to each other" in warning for warning in plan.warnings)


def test_tensor_mode_on_one_gpu_is_refused(configure: Configure, public: Public) -> None:
    loaded = configure(parallel={"mode": "tensor"})

    code, (fault,) = refusal(loaded, public("qwen2.5-7b"), assumed_host("1x32GiB"))

    assert (code, fault.code) == (ExitCode.CONFIG, "TP_INVALID")


def test_model_that_does_not_divide_falls_to_pipeline(configure: Configure, tiny: Tiny) -> None:
    summary = tiny(intermediate_size=112)
    loaded = configure(parallel={"mode": "tensor"})

    code, (fault,) = refusal(loaded, summary, assumed_host("2x16GiB-nvlink"))

    assert (code, fault.code) == (ExitCode.CONFIG, "E_TP_GROUP")
    assert fault.fix == "use one of the (tensor, pipeline) pairs (1, 1), (1, 2)"


@pytest.mark.parametrize(
    ("wanted", "indexes"), [("all", (0,)), ([1], (1,)), (["GPU-assumed-1"], (1,))], ids=str
)
def test_gpus_are_those_the_configuration_names(
    configure: Configure, tiny: Tiny, wanted: object, indexes: tuple[int, ...]
) -> None:
    plan = make_plan(configure(parallel={"gpus": wanted}), tiny(), assumed_host("2x16GiB"))

    assert plan.parallel.gpu_indexes == indexes


@pytest.mark.parametrize("wanted", [[5], ["GPU-other"]], ids=str)
def test_gpu_that_is_absent_is_refused(configure: Configure, tiny: Tiny, wanted: object) -> None:
    loaded = configure(parallel={"gpus": wanted})

    code, (fault,) = refusal(loaded, tiny(), assumed_host("2x16GiB"))

    assert (code, fault.code) == (ExitCode.NO_GPU, "GPU_MISSING")


def test_machine_without_gpus_is_refused(configure: Configure, tiny: Tiny) -> None:
    code, (fault,) = refusal(configure(), tiny(), HostFacts())

    assert (code, fault.code) == (ExitCode.NO_GPU, "GPU_MISSING")
    assert "--assume" in fault.fix


def test_gpu_without_a_size_is_refused(configure: Configure, tiny: Tiny) -> None:
    host = assumed_host("1x16GiB")
    blind = replace(host, gpus=(replace(host.gpus[0], memory_total_bytes=None),))

    code, (fault,) = refusal(configure(), tiny(), blind)

    assert (code, fault.code) == (ExitCode.NO_GPU, "GPU_UNREADABLE")


def test_one_rank_goes_to_the_gpu_with_most_room(configure: Configure, tiny: Tiny) -> None:
    host = assumed_host("2x16GiB")
    mixed = replace(host, gpus=(host.gpus[0], replace(host.gpus[1], memory_total_bytes=2**35)))

    plan = make_plan(configure(), tiny(), mixed)

    assert plan.parallel.gpu_indexes == (1,)
    assert any("different memory" in warning for warning in plan.warnings)


def test_card_of_another_generation_is_remarked(configure: Configure, tiny: Tiny) -> None:
    host = assumed_host("1x16GiB")
    other = replace(host, gpus=(replace(host.gpus[0], compute_capability=(8, 0)),))

    plan = make_plan(configure(execution={"allow_unvalidated": True}), tiny(), other)

    assert any("compute capability 8.0" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("busy", "expected"), [(0, 0.9), (1, 0.9), (4 * GIB, 0.714)], ids=["idle", "1 B", "4 GiB"]
)
def test_utilization_leaves_what_others_hold(
    configure: Configure, tiny: Tiny, busy: int, expected: float
) -> None:
    host = assumed_host("1x16GiB")
    total = host.gpus[0].memory_total_bytes or 0
    held = replace(host, gpus=(replace(host.gpus[0], memory_free_bytes=total - busy),))

    plan = make_plan(configure(), tiny(), held)

    assert plan.memory.gpu_memory_utilization == expected
    assert total * expected <= total - busy


def test_graphs_need_a_canary(configure: Configure, tiny: Tiny) -> None:
    with_canary = make_plan(configure(), tiny(), assumed_host("1x16GiB"))
    loaded = configure(startup={"canary": False})
    without = make_plan(loaded, tiny(), assumed_host("1x16GiB"))

    assert not with_canary.execution.enforce_eager
    assert with_canary.memory.ranks[0].bytes_of("cuda_graphs") > 0
    assert without.execution.enforce_eager
    assert without.memory.ranks[0].bytes_of("cuda_graphs") == 0


def test_graphs_give_way_to_the_cache(configure: Configure, tiny: Tiny) -> None:
    host = assumed_host("1x16GiB")
    plan = make_plan(configure(), tiny(), host)
    budget = plan.memory.ranks[0]
    fixed = budget.used_bytes - budget.bytes_of("kv_cache")
    needed = fixed + 16 * 2048 * tiny().geometry.kv_bytes_per_token()
    # Room for everything but half of the graphs.
    room = needed - budget.bytes_of("cuda_graphs") // 2
    total = int(room / 0.9) + 1
    small = replace(host, gpus=(replace(host.gpus[0], memory_total_bytes=total),))

    eager = make_plan(configure(memory={"gpu_memory_utilization": 0.9}), tiny(), small)

    assert eager.execution.enforce_eager
    assert decision(eager, "execution.enforce_eager")[1].startswith("the memory of CUDA graphs")


def test_custom_all_reduce_stays_off_even_when_asked_for(configure: Configure, tiny: Tiny) -> None:
    loaded = configure(execution={"custom_all_reduce": True})

    plan = make_plan(loaded, tiny(), assumed_host("2x16GiB-nvlink"))

    assert not plan.execution.custom_all_reduce
    assert any("no self-test" in warning for warning in plan.warnings)


def test_decoded_weights_on_a_gpu_take_two_bytes(configure: Configure, tiny: Tiny) -> None:
    loaded = configure(execution={"weights": "dequantized"})

    budget = make_plan(loaded, tiny(), assumed_host("1x16GiB")).memory.ranks[0]

    assert budget.bytes_of("weights.codes") == 0
    assert budget.bytes_of("weights.decoded") == 3 * (2 * 256 * 64 + 2 * 128 * 64 + 3 * 96 * 64) * 2


def test_prompts_that_are_not_cut_bound_the_context(configure: Configure, tiny: Tiny) -> None:
    loaded = configure(execution={"chunked_prefill": False}, memory={"max_num_batched_tokens": 512})

    plan = make_plan(loaded, tiny(), assumed_host("1x16GiB"))

    assert plan.model.max_model_len == 512


def test_hybrid_is_text_only_and_recurrent(configure: Configure, public: Public) -> None:
    plan = make_plan(configure(), public("quasar-27b"), assumed_host("1x32GiB"))

    assert plan.model.text_only
    assert plan.model.recurrent
    assert plan.memory.ranks[0].bytes_of("gdn_state") > 16 * 2 * 150e6


def test_plan_for_completions_needs_no_chat_template(configure: Configure, tiny: Tiny) -> None:
    bare = replace(tiny(), has_chat_template=False)

    loaded = configure(server={"api": "completions_only"})

    plan = make_plan(loaded, bare, assumed_host("1x16GiB"))

    assert not plan.model.has_chat_template


def test_gate_section_is_carried_in_plain_values(configure: Configure, tiny: Tiny) -> None:
    loaded = configure(gate={"timeout": "25s", "p2p": {"test_timeout": "10s"}})

    plan = make_plan(loaded, tiny(), assumed_host("1x16GiB"))

    assert (plan.gate["timeout"], plan.gate["p2p"]["test_timeout"]) == (25.0, 10.0)


def test_other_ways_are_listed(configure: Configure, public: Public) -> None:
    plan = make_plan(configure(), public("quasar-27b"), assumed_host("2x16GiB-nvlink"))

    single, pipeline = plan.alternatives
    assert (single.split, single.max_model_len) == ("single", 0)
    assert single.missing_bytes > 5 * GIB
    assert (pipeline.split, pipeline.missing_bytes) == ("pipeline=2", 0)
    assert pipeline.kv_capacity_tokens > 100_000


def test_plan_reads_back_equal(configure: Configure, public: Public) -> None:
    plan = make_plan(configure(), public("quasar-27b"), assumed_host("2x16GiB-nvlink"))

    assert LaunchPlan.from_json(plan.to_json()) == plan


def test_cooling_limits_of_the_configuration_reach_the_run(
    configure: Configure, tiny: Tiny
) -> None:
    thermal = {"leave_gpu_c": 61, "leave_hbm_margin_c": 17}
    loaded = configure(
        execution={"device": "cpu"}, memory={"kv_cache_size": "1GiB"}, runtime={"thermal": thermal}
    )

    run = make_plan(loaded, tiny(), HOST).run

    assert (run.leave_gpu_c, run.leave_hbm_margin_c) == (61, 17)
