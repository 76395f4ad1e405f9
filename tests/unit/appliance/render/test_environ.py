"""The engine's environment: always offline and silent, steered by nothing that is inherited."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.plan.adjustments import Adjustments
from appliance.plan.launch_plan import LaunchPlan
from appliance.render.environ import (
    DROPPED_PREFIXES,
    KEPT,
    Variable,
    child_environment,
    environment,
    is_dropped,
)

ALWAYS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "nvfp4",
    "PYTHONSAFEPATH": "1",
}


def values(
    plan: LaunchPlan, adjustments: Adjustments | None = None, cpus: int = 4
) -> dict[str, str]:
    given_cpus = range(cpus)
    if adjustments is None:
        return {v.name: v.value for v in environment(plan, cpus=given_cpus)}
    return {v.name: v.value for v in environment(plan, adjustments, cpus=given_cpus)}


def test_environment_is_offline_and_silent_in_every_case(cases: ModuleType) -> None:
    for name, case in cases.CASES.items():
        assert ALWAYS.items() <= values(case.plan, case.adjustments).items(), name


def test_environment_names_gpus_by_uuid_in_the_order_of_ranks(plan: LaunchPlan) -> None:
    found = values(plan)

    assert found["CUDA_VISIBLE_DEVICES"] == ",".join(plan.parallel.gpus)
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_environment_of_the_cpu_engine_has_no_cuda_variable(cpu_plan: LaunchPlan) -> None:
    assert not any(name.startswith(("CUDA_", "NCCL_")) for name in values(cpu_plan))


def test_environment_start_up_deadline_is_the_plans_rounded_up(plan: LaunchPlan) -> None:
    late = replace(plan, run=replace(plan.run, startup_timeout_s=90.2))

    assert values(late)["VLLM_ENGINE_READY_TIMEOUT_S"] == "91"


def test_environment_custom_all_reduce_is_tested_by_copies(plan: LaunchPlan) -> None:
    on = replace(plan, execution=replace(plan.execution, custom_all_reduce=True))

    assert values(on)["VLLM_SKIP_P2P_CHECK"] == "0"
    assert "VLLM_SKIP_P2P_CHECK" not in values(plan)


def test_environment_cache_of_a_cpu_rank_is_its_share_in_gib(cpu_plan: LaunchPlan) -> None:
    assert cpu_plan.memory.kv_cache_bytes == 4 * 1024**3
    assert values(cpu_plan)["VLLM_CPU_KVCACHE_SPACE"] == "2"


@pytest.mark.parametrize(
    ("cpus", "binding"), [(4, "0,1|2,3"), (5, "0,1|2,3"), (2, "0|1"), (1, "0|0")]
)
def test_environment_deals_cores_out_to_cpu_ranks(
    cpu_plan: LaunchPlan, cpus: int, binding: str
) -> None:
    assert values(cpu_plan, cpus=cpus)["VLLM_CPU_OMP_THREADS_BIND"] == binding


def test_environment_one_cpu_rank_is_left_to_the_engine(cases: ModuleType) -> None:
    assert "VLLM_CPU_OMP_THREADS_BIND" not in values(cases.CASES["cpu_single"].plan)


def test_environment_uses_this_process_cores_by_default(cpu_plan: LaunchPlan) -> None:
    found = {v.name: v.value for v in environment(cpu_plan)}

    assert found["VLLM_CPU_OMP_THREADS_BIND"].count("|") == 1


def test_environment_gate_value_wins_and_carries_its_measurement(plan: LaunchPlan) -> None:
    adjustments = Adjustments(
        env={"NCCL_P2P_DISABLE": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}, reasons=("no copy arrived",)
    )

    found = {v.name: v for v in environment(plan, adjustments)}

    assert found["NCCL_P2P_DISABLE"] == Variable("NCCL_P2P_DISABLE", "1", "gate: no copy arrived")
    assert found["VLLM_LOGGING_LEVEL"].value == "DEBUG"


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_environment_log_level_is_the_configured_one(plan: LaunchPlan, level: str) -> None:
    chosen = replace(plan, run=replace(plan.run, log_level=level))

    assert values(chosen)["VLLM_LOGGING_LEVEL"] == level.upper()


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_PORT",
        "VLLM_API_KEY",
        "VLLM_ATTENTION_BACKEND",
        "NCCL_P2P_LEVEL",
        "CUDA_VISIBLE_DEVICES",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCH_COMPILE_DISABLE",
        "HF_TOKEN",
        "OMP_NUM_THREADS",
        "PYTHONPATH",
        "PYTHONSTARTUP",
    ],
)
def test_child_environment_drops_what_would_steer_the_engine(plan: LaunchPlan, name: str) -> None:
    variables = environment(plan)
    fixed = {variable.name: variable.value for variable in variables}

    result, dropped = child_environment(variables, {name: "tcp://10.0.0.1:8000", "PATH": "/bin"})

    assert result.get(name) == fixed.get(name)
    assert dropped == (() if name in fixed else (name,))
    assert result["PATH"] == "/bin"


@pytest.mark.parametrize("name", [*sorted(KEPT), "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "TZ"])
def test_child_environment_keeps_places_and_locale(plan: LaunchPlan, name: str) -> None:
    result, dropped = child_environment(environment(plan), {name: "/x"})

    assert result[name] == "/x"
    assert dropped == ()


@given(st.dictionaries(st.text(min_size=1), st.text(), max_size=5))
def test_child_environment_rendered_values_always_win(inherited: dict[str, str]) -> None:
    variables = (Variable("VLLM_PLUGINS", "nvfp4", "policy"), Variable("PATH", "/x", "policy"))

    result, _ = child_environment(variables, {**inherited, "PATH": "/y", "VLLM_PLUGINS": ""})

    assert result["VLLM_PLUGINS"] == "nvfp4"
    assert result["PATH"] == "/x"


def test_every_kept_name_would_else_be_dropped() -> None:
    assert all(name.startswith(DROPPED_PREFIXES) and not is_dropped(name) for name in KEPT)
