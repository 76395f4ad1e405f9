"""The command line: policies that always hold, origins, and words that survive odd values."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.plan.adjustments import Adjustments
from appliance.plan.launch_plan import Decision, LaunchPlan
from appliance.render.argv import capture_sizes, engine_command, vllm_argv


def words(plan: LaunchPlan, adjustments: Adjustments | None = None) -> list[str]:
    items = vllm_argv(plan) if adjustments is None else vllm_argv(plan, adjustments)
    return [word for item in items for word in item.words]


def test_argv_on_a_gpu_computes_in_float16_in_every_case(cases: ModuleType) -> None:
    for name, case in cases.CASES.items():
        expected = "float16" if case.plan.execution.device == "cuda" else "float32"

        assert f"--dtype={expected}" in words(case.plan), name


def test_argv_turns_custom_all_reduce_off_unless_the_plan_has_it_on(plan: LaunchPlan) -> None:
    on = replace(plan, execution=replace(plan.execution, custom_all_reduce=True))

    assert "--disable-custom-all-reduce" in words(plan)
    assert "--disable-custom-all-reduce" not in words(on)


def test_argv_of_a_gpu_plan_names_the_attention_backend(plan: LaunchPlan) -> None:
    assert "--attention-backend=CUSTOM" in words(plan)


def test_argv_of_a_dense_checkpoint_has_no_quantization(cases: ModuleType) -> None:
    dense = words(cases.CASES["awkward_words"].plan)

    assert not any(word.startswith("--quantization") for word in dense)


def test_argv_keeps_a_recurrent_state_in_float32(plan: LaunchPlan) -> None:
    hybrid = replace(plan, model=replace(plan.model, recurrent=True))

    assert "--mamba-ssm-cache-dtype=float32" in words(hybrid)
    assert not any(word.startswith("--mamba") for word in words(plan))


def test_argv_cpu_engine_has_no_gpu_flags(cpu_plan: LaunchPlan) -> None:
    flags = {word.partition("=")[0] for word in words(cpu_plan)}

    assert flags.isdisjoint(
        {
            "--gpu-memory-utilization",
            "--attention-backend",
            "--compilation-config",
            "--disable-custom-all-reduce",
        }
    )


@pytest.mark.parametrize(
    ("device", "settings", "origin"),
    [
        (
            "cuda",
            {"weights": "fused", "lenient": "tensors-win"},
            "config execution.weights; config model.lenient",
        ),
        ("cpu", {"lenient": "tensors-win"}, "config model.lenient"),
    ],
)
def test_argv_tells_the_plugin_that_tensors_win(
    request: pytest.FixtureRequest, device: str, settings: dict[str, str], origin: str
) -> None:
    base: LaunchPlan = request.getfixturevalue("plan" if device == "cuda" else "cpu_plan")
    lenient = replace(base, model=replace(base.model, lenient="tensors-win"))
    flag = "--additional-config="

    assert not any("lenient" in word for word in words(base))
    [item] = [item for item in vllm_argv(lenient) if item.words[0].startswith(flag)]

    assert json.loads(item.words[0].removeprefix(flag)) == {"nvfp4": settings}
    assert item.origin == origin


def test_argv_eager_has_no_graphs(plan: LaunchPlan) -> None:
    eager = replace(plan, execution=replace(plan.execution, enforce_eager=True))
    word = next(word for word in words(eager) if word.startswith("--compilation-config="))

    assert "--enforce-eager" in words(eager)
    assert json.loads(word.partition("=")[2])["cudagraph_mode"] == "NONE"


def test_argv_is_the_same_twice(plan: LaunchPlan) -> None:
    assert vllm_argv(plan) == vllm_argv(plan)


def test_argv_origin_of_a_decision_is_its_reason(plan: LaunchPlan) -> None:
    decided = replace(plan, decisions=(Decision("parallel.mode", "tensor", "it does not fit one"),))
    origins = {item.words[0].partition("=")[0]: item.origin for item in vllm_argv(decided)}

    assert origins["--tensor-parallel-size"] == "plan parallel.mode: it does not fit one"
    assert origins["--max-num-seqs"] == "config memory.max_num_seqs"
    assert origins["--middleware"].startswith("policy: ")


def test_argv_later_decision_on_a_key_counts(plan: LaunchPlan) -> None:
    changed = Decision("execution.custom_all_reduce", "false", "a safer start")
    decided = replace(plan, decisions=(*plan.decisions, changed))

    item = next(i for i in vllm_argv(decided) if i.words == ("--disable-custom-all-reduce",))

    assert item.origin == "plan execution.custom_all_reduce: a safer start"


def test_argv_gate_adjustment_is_added_once_with_its_measurement(plan: LaunchPlan) -> None:
    on = replace(plan, execution=replace(plan.execution, custom_all_reduce=True))
    adjustments = Adjustments(args=("--disable-custom-all-reduce",), reasons=("the copy hung",))

    added = [item for item in vllm_argv(on, adjustments) if item.origin.startswith("gate")]

    assert [(item.words, item.origin) for item in added] == [
        (("--disable-custom-all-reduce",), "gate: the copy hung")
    ]
    assert words(plan, adjustments).count("--disable-custom-all-reduce") == 1


def test_argv_every_flag_stands_once(cases: ModuleType) -> None:
    for name, case in cases.CASES.items():
        flags = [word.partition("=")[0] for word in words(case.plan, case.adjustments)]

        assert len(flags) == len(set(flags)), name


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (16, (1, 2, 4, 8, 16)),
        (20, (1, 2, 4, 8, 16, 20)),
        (1024, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)),
    ],
)
def test_capture_sizes_end_at_the_limit(limit: int, sizes: tuple[int, ...]) -> None:
    assert capture_sizes(limit) == sizes


@given(st.integers(1, 1024), st.data())
def test_capture_sizes_leave_every_batch_a_graph_not_much_larger(
    limit: int, data: st.DataObject
) -> None:
    batch = data.draw(st.integers(1, limit))

    size = min(size for size in capture_sizes(limit) if size >= batch)

    assert size <= max(8, 1.5 * batch + 8)


def test_engine_command_starts_the_api_server_by_its_module(plan: LaunchPlan) -> None:
    command = engine_command(vllm_argv(plan), "/usr/bin/python3")

    assert command[:3] == ("/usr/bin/python3", "-m", "vllm.entrypoints.openai.api_server")
    assert list(command[3:]) == words(plan)


@pytest.mark.engine
@pytest.mark.slow
def test_argv_of_every_case_is_taken_by_vllms_own_parser(
    cases: ModuleType, tmp_path: Path, repository: Path
) -> None:
    lines = {name: words(case.plan, case.adjustments) for name, case in cases.CASES.items()}
    source = tmp_path / "lines.json"
    source.write_text(json.dumps(lines))
    script = repository / "tests/golden/parse_argv.py"

    parsed = subprocess.run(
        (sys.executable, str(script), str(source)), capture_output=True, text=True, check=False
    )

    assert parsed.returncode == 0, parsed.stderr[-2000:]
    found = json.loads(parsed.stdout)
    assert found.keys() == lines.keys()
    for name, case in cases.CASES.items():
        plan, values = case.plan, found[name]
        assert values["model"] == plan.model.path, name
        assert values["served_model_name"] == [plan.model.served_name], name
        assert values["dtype"] == plan.execution.dtype, name
        assert values["max_model_len"] == plan.model.max_model_len, name
        assert values["tensor_parallel_size"] == plan.parallel.tensor_parallel, name
        assert values["pipeline_parallel_size"] == plan.parallel.pipeline_parallel, name
        assert values["enable_prefix_caching"] is plan.execution.prefix_caching, name
        assert values["enable_chunked_prefill"] is plan.execution.chunked_prefill, name
        assert values["enforce_eager"] is plan.execution.enforce_eager, name
        assert values["middleware"] == ["appliance.serve.middleware.Gateway"], name
        assert values["language_model_only"] is True, name
        quantization = None if plan.model.quantization == "none" else "nvfp4"
        assert values["quantization"] == quantization, name
        if plan.execution.device == "cuda":
            custom = plan.execution.custom_all_reduce
            assert values["disable_custom_all_reduce"] is not custom, name
            assert values["attention_backend"] == plan.execution.attention_backend, name
            graphs = "NONE" if plan.execution.enforce_eager else "FULL_DECODE_ONLY"
            assert values["cudagraph_mode"] == graphs, name
            assert values["compilation_mode"] == "NONE", name
    awkward = found["awkward_words"]
    assert awkward["chat_template"] == "/models/chat's template.jinja"
    assert awkward["trust_remote_code"] is True
    assert awkward["max_logprobs"] == -1
    assert awkward["async_scheduling"] is False
