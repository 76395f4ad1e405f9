"""Reported faults of geometry, memory and plan, by the id of the case."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from planned import plan_of, words_of

from appliance.checkpoint.read import summarize
from appliance.config.load import load_config
from appliance.errors import ApplianceError
from appliance.plan.attention import OURS
from appliance.plan.planner import make_plan
from appliance.plan.validated import ENGINE, ROWS, unvalidated
from appliance.serve.canary import long_prompt_length
from healthchecks.assumed import assumed_host

Run = Callable[..., Any]
Model = Callable[..., Path]
Validate = Callable[..., Any]


@pytest.fixture(scope="module")
def quasar(tmp_path_factory: pytest.TempPathFactory, hollow: ModuleType) -> Path:
    """The hybrid 27B of the reports, all header."""
    return hollow.build(tmp_path_factory.mktemp("models"), "quasar-27b")


def test_rc_012_plan_of_two_16_gb_cards_counts_every_share_before_anything_starts(
    validate: Validate, quasar: Path
) -> None:
    plan = plan_of(validate(quasar, "2x16GiB-nvlink", "--json"))

    for budget in plan.memory.ranks:
        names = {item.name for item in budget.items}
        assert {"weights.codes", "activations", "cuda_context", "comm_buffers"} <= names
        assert budget.used_bytes <= budget.usable_bytes
        assert ("cuda_graphs" in names) is not plan.execution.enforce_eager
    assert long_prompt_length(plan) >= plan.memory.max_num_batched_tokens
    assert "--language-model-only" in words_of(plan)
    captured = [word for word in words_of(plan) if "cudagraph_capture_sizes" in word]
    assert all(f",{plan.memory.max_num_seqs}]" in word for word in captured)


def test_rc_014_context_that_does_not_fit_is_refused_with_the_one_that_does(
    validate: Validate, quasar: Path
) -> None:
    ended = validate(quasar, "1x32GiB", model={"max_model_len": 262144})
    longest = re.search(r"set model.max_model_len: (\d+), the longest that fits", ended.err)

    assert (ended.code, ended.codes) == (32, ["PLAN_DOES_NOT_FIT"])
    assert longest is not None
    again = validate(quasar, "1x32GiB", "--json", model={"max_model_len": int(longest[1])})
    assert plan_of(again).model.max_model_len == int(longest[1])


def test_rc_014_context_above_the_models_own_is_refused_and_auto_is_a_number(
    validate: Validate, model: Model
) -> None:
    path = model()
    beyond = validate(path, model={"max_model_len": 4097})

    assert (beyond.code, beyond.codes) == (10, ["CONTEXT_TOO_LONG"])
    assert "set it to 4096 or less" in beyond.err
    assert "--max-model-len=4096" in words_of(plan_of(validate(path, "1x16GiB", "--json")))


def test_rc_026_every_switch_is_rendered_and_one_that_was_never_on_is_refused(
    file: Callable[..., Path], validate: Validate, model: Model
) -> None:
    path = model()
    plan = plan_of(validate(path, "1x16GiB", "--json"))
    (row,) = (row for row in ROWS if (row.capability, row.attention) == ((7, 0), OURS))
    without = replace(row, features=frozenset({"chunked_prefill"}))

    with pytest.raises(ApplianceError, match=r"NOT_VALIDATED.*sm_70 CUSTOM: .*, chunked_prefill,"):
        unvalidated(load_config(file(path)), "nvfp4", plan.execution, [(7, 0)], rows=[without])

    off = {"chunked_prefill": False, "prefix_caching": False}
    all_off = plan_of(validate(path, "1x16GiB", "--json", execution=off))
    flags = {"--enable-chunked-prefill", "--enable-prefix-caching"}
    assert flags <= set(words_of(plan))
    assert {flag.replace("--", "--no-") for flag in flags} <= set(words_of(all_off))


def test_rc_026_table_is_about_the_engine_that_is_locked(repository: Path) -> None:
    build = (repository / "Dockerfile.build").read_text()
    page = (repository / "docs/gpu-engine.md").read_text()

    assert f"ARG VLLM_VERSION={ENGINE}\n" in build
    for row in ROWS:
        capability, attention = str(row).split(":")[0].split()
        formats = ", ".join(sorted(row.formats))
        assert f"| {capability} | {attention} | {row.evidence} | {formats} |" in page


@pytest.mark.parametrize("tokens", [64, 2048])
def test_rc_026_canary_is_longer_than_a_step_and_a_block_of_the_cache(
    validate: Validate, quasar: Path, tokens: int
) -> None:
    memory = {"max_num_batched_tokens": tokens, "max_num_seqs": 2}
    plan = plan_of(validate(quasar, "2x32GiB-nvlink", "--json", memory=memory))

    assert plan.memory.kv_block_tokens > 16, "a block holds a recurrent state"
    assert long_prompt_length(plan) > max(tokens, plan.memory.kv_block_tokens)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"head_dim": 16}, "d=16 gs=1 kv=float16"),
        ({"head_dim": 64, "num_key_value_heads": 3}, "d=64 gs=8/3 kv=float16"),
    ],
)
def test_rc_028_heads_without_a_kernel_are_refused_before_any_gpu(
    validate: Validate, model: Model, shape: dict[str, int], said: str
) -> None:
    ended = validate(model(**shape))

    assert (ended.code, ended.codes) == (30, ["NO_KERNEL"])
    assert said in ended.err


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_rc_029_fp8_cache_is_refused_with_what_there_is(
    validate: Validate, model: Model, dtype: str
) -> None:
    ended = validate(model(), memory={"kv_cache_dtype": dtype})

    assert (ended.code, ended.codes) == (10, ["CONFIG_VALUE"])
    assert "memory.kv_cache_dtype" in ended.err
    assert "`auto`" in ended.err


def test_rc_037_what_was_never_run_is_refused_and_allowed_only_with_the_canary(
    validate: Validate, model: Model
) -> None:
    path = model(head_dim=80)
    refused = validate(path)
    allowed = {"execution": {"allow_unvalidated": True}, "startup": {"canary": False}}
    ended = validate(path, "2x16GiB", "--json", **allowed)
    plan = plan_of(ended)

    assert (refused.code, refused.codes) == (30, ["NOT_VALIDATED"])
    assert "got sm_70 TRITON_ATTN: nvfp4, fused, chunked_prefill/prefix_caching;" in refused.err
    assert "nobody ran sm_70 TRITON_ATTN" in ended.err
    assert plan.run.canary
    assert any(d.key == "startup.canary" and d.value == "true" for d in plan.decisions)


@pytest.mark.parametrize(
    ("capability", "is_run"),
    [((7, 0), True), ((9, 0), True), ((7, 5), False), ((8, 0), False), (None, True)],
)
def test_rc_037_gpu_of_another_kind_is_in_the_table_or_refused(
    file: Callable[..., Path], model: Model, capability: Any, is_run: bool
) -> None:
    path = model()
    loaded = load_config(file(path))
    host = assumed_host("1x16GiB")
    other = replace(host, gpus=(replace(host.gpus[0], compute_capability=capability),))
    summary = summarize(path)

    if is_run:  # one that cannot be read is the gate's to judge
        assert make_plan(loaded, summary, other).execution.attention_backend == OURS
        return
    with pytest.raises(ApplianceError, match=r"error\[NOT_VALIDATED\]") as caught:
        make_plan(loaded, summary, other)
    assert int(caught.value.exit_code) == 30


@pytest.mark.parametrize(
    ("width", "ranks", "fits"), [(1856, 8, False), (1856, 4, True), (640, 8, True)]
)
def test_rc_047_cut_inside_of_a_block_scale_is_refused_with_the_cuts_that_work(
    validate: Validate, model: Model, width: int, ranks: int, fits: bool
) -> None:
    ended = validate(model(intermediate_size=width), f"{ranks}x16GiB", parallel={"mode": "tensor"})

    if fits:
        assert ended.code == 0, ended.err
        return
    assert (ended.code, set(ended.codes)) == (10, {"E_TP_GROUP"})
    assert "1856 / 8 = 232" in ended.err
    assert "(4, 2)" in ended.err
    assert "(8, 1)" not in ended.err


@pytest.mark.parametrize(
    ("assume", "mode", "is_told"),
    [
        ("2x16GiB-p2p", "tensor", True),
        ("2x16GiB", "tensor", True),
        ("2x16GiB-nvlink", "tensor", False),
        ("2x16GiB-p2p", "auto", False),
    ],
)
def test_rc_059_cutting_layers_over_pcie_where_one_gpu_does_is_told(
    validate: Validate, model: Model, assume: str, mode: str, is_told: bool
) -> None:
    ended = validate(model(), assume, parallel={"mode": mode})

    assert ended.code == 0
    assert ("TP_SLOW_LINK" in ended.err) is is_told


def test_rc_064_bfloat16_of_the_checkpoint_is_served_in_float16(
    validate: Validate, model: Model
) -> None:
    path = model(torch_dtype="bfloat16")

    plan = plan_of(validate(path, "1x16GiB", "--json"))
    asked = validate(path, execution={"extra_args": {"dtype": "bfloat16"}})

    assert [word for word in words_of(plan) if word.startswith("--dtype")] == ["--dtype=float16"]
    assert (asked.code, asked.codes) == (10, ["FLAG_OWNED"])


def shapes_of(appliance: Run, path: Path, ranks: int) -> dict[str, tuple[Any, ...]]:
    ended = appliance("model", "inspect", path, "--tensor", str(ranks), "--json")
    assert ended.code == 0, ended.err
    return {
        each["module"]: (each["rows"], each["columns"], each["padded"], each["count"])
        for each in json.loads(ended.out)["shapes"]
    }


def test_rc_046_every_matrix_of_a_rank_is_listed_with_its_padding(
    appliance: Run, quasar: Path, model: Model
) -> None:
    halves, quarters = shapes_of(appliance, quasar, 2), shapes_of(appliance, quasar, 4)
    odd = shapes_of(appliance, model(num_hidden_layers=3, head_dim=80), 8)

    # 2 x 16 x 128 keys and 2 x 48 x 128 values; the gates of 48 heads, in tiles of 64.
    assert halves["linear_attn.in_proj_qkvz"] == (8192, 5120, [8192, 5120], 48)
    assert halves["linear_attn.in_proj_ba"] == (48, 5120, [64, 5120], 48)
    assert quarters["linear_attn.in_proj_ba"] == (24, 5120, [64, 5120], 48)
    assert halves["self_attn.qkv_proj"] == ((2 * 24 + 2 * 4) * 256 // 2, 5120, [7168, 5120], 16)
    assert quarters["mlp.down_proj"] == (5120, 4352, [5120, 4352], 64)
    assert odd["self_attn.qkv_proj"] == (240, 512, [256, 512], 3)


def test_rc_046_cut_that_no_padding_mends_is_refused(appliance: Run, model: Model) -> None:
    ended = appliance("model", "inspect", model(intermediate_size=1856), "--tensor", "8")

    assert (ended.code, set(ended.codes)) == (10, {"E_TP_GROUP"})
