"""What FP8, groups of 128 and experts of 16 bits mean for the plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from planning import HOST, Configure

from appliance.checkpoint.read import summarize
from appliance.checkpoint.summary import CheckpointSummary
from appliance.errors import ApplianceError
from appliance.plan.launch_plan import LaunchPlan
from appliance.plan.planner import make_plan
from healthchecks.assumed import assumed_host

Write = Callable[..., CheckpointSummary]
GPU = assumed_host("1x16GiB")
DENSE: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
ATTENTION, MLP, EXPERTS = 2 * (256 * 256 + 128 * 256), 3 * 384 * 256, 4 * 3 * 128 * 256
KEPT = ("lm_head", "mlp.gate")


def fp8(rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    blocks = (-(-rows // 128), -(-columns // 128))
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale_inv": ("F32", blocks)}


def quasar(rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    scales = ("F16", (rows, columns // 128))
    return {"qweight": ("I32", (rows, columns // 8)), "weight_scales": scales}


PRODUCERS = {
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "quasar": (quasar, {"quant_method": "nvfp4", "group_size": 128, "ignore": ["lm_head"]}),
    "dense": (lambda *shape: {"weight": ("BF16", shape)}, None),
}


@pytest.fixture
def write(tmp_path: Path, hollow: ModuleType) -> Write:
    """Return a function from a producer and a configuration to the summary of its checkpoint."""

    def make(producer: str, config: dict[str, object], **changes: object) -> CheckpointSummary:
        parts_of, stated = PRODUCERS[producer]
        made = hollow.model(config)
        tensors = dict(made.tensors)
        for name, shape in made.linears.items():
            parts = {"weight": ("BF16", shape)} if name.endswith(KEPT) else parts_of(*shape)
            tensors |= {f"{name}.{part}": entry for part, entry in parts.items()}
        if stated is not None:
            config = config | {"quantization_config": stated | changes}
        return summarize(hollow.write(tmp_path / "made", config, tensors))

    return make


def bytes_of(plan: LaunchPlan, name: str) -> int:
    return plan.memory.ranks[0].bytes_of(f"weights.{name}")


def reason_of(plan: LaunchPlan, key: str) -> str:
    return next(each.reason for each in plan.decisions if each.key == key)


def test_fp8_alone_is_planned_at_two_bytes_a_weight(configure: Configure, write: Write) -> None:
    summary = write("fp8", DENSE)

    plan = make_plan(configure(), summary, GPU)

    assert (summary.format, summary.producer) == ("fp8", "fp8")
    assert (plan.model.format, plan.model.quantization) == ("fp8", "nvfp4")
    assert bytes_of(plan, "decoded") == 2 * (ATTENTION + MLP) * 2
    assert bytes_of(plan, "codes") == bytes_of(plan, "block_scales") == 0
    decoded = "FP8 is decoded to FP16 while loading, 2 bytes a weight"
    assert reason_of(plan, "execution.weights") == decoded


def test_fp8_on_the_cpu_is_planned_at_four_bytes_a_weight(on_cpu: Configure, write: Write) -> None:
    plan = make_plan(on_cpu(), write("fp8", DENSE), HOST)

    assert bytes_of(plan, "decoded") == 2 * (ATTENTION + MLP) * 4
    assert reason_of(plan, "execution.weights").endswith(
        "; FP8 is decoded to FP32 while loading, 4 bytes a weight"
    )


def test_fp8_experts_on_a_gpu_are_decoded_and_told_to_be_unproved(
    configure: Configure, write: Write
) -> None:
    plan = make_plan(configure(), write("fp8", MOE), GPU)

    assert bytes_of(plan, "decoded") == 2 * (ATTENTION + EXPERTS) * 2
    assert [each for each in plan.warnings if each.startswith("experts of 8 or 16 bits")]


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("of_each", [(4,), (4, 1, 1), "rows", "blocks"], ids=str)
def test_fp8_experts_in_stacks_are_counted_like_single_ones(
    configure: Configure,
    tmp_path: Path,
    hollow: ModuleType,
    part: str,
    of_each: tuple[int, ...] | str,
) -> None:
    made = hollow.model(MOE)
    tensors = dict(made.tensors)
    for name, shape in made.linears.items():
        if ".experts." not in name:
            parts = {"weight": ("BF16", shape)} if name.endswith(KEPT) else fp8(*shape)
            tensors |= {f"{name}.{part}": entry for part, entry in parts.items()}
    for layer in range(2):
        for leaf, rows, columns in (("gate_up_proj", 256, 256), ("down_proj", 256, 128)):
            kinds = {"rows": (4, rows, 1), "blocks": (4, rows // 128, columns // 128)}
            stack = f"model.layers.{layer}.mlp.experts.{leaf}"
            tensors[stack] = ("F8_E4M3", (4, rows, columns))
            tensors[f"{stack}_{part}"] = ("F32", kinds.get(of_each, of_each))
    names: dict[object, str] = {"rows": "FP8_PER_CHANNEL_PER_TOKEN", "blocks": "FP8_PB_WO"}
    layers = {name: "FP8_PB_WO" for name in made.linears if not name.endswith(KEPT)} | {
        f"model.layers.{layer}.mlp.experts": names.get(of_each, "FP8") for layer in range(2)
    }
    stated = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {name: {"quant_algo": each} for name, each in layers.items()},
    }
    config = MOE | {"quantization_config": stated}

    plan = make_plan(configure(), summarize(hollow.write(tmp_path / "made", config, tensors)), GPU)

    assert bytes_of(plan, "decoded") == 2 * (ATTENTION + EXPERTS) * 2


@pytest.mark.parametrize("listed", [["lm_head"], ["model.layers.0.mlp.gate"]])
def test_fp8_takes_unlisted_dense_modules_as_they_are(write: Write, listed: list[str]) -> None:
    assert write("fp8", MOE, modules_to_not_convert=listed).format == "fp8"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"weight_block_size": [64, 64]}, "E_GROUP_SIZE"),
        ({"modules_to_not_convert": ["model.layers.0.mlp.up_proj"]}, "E_EXCLUDED_BUT_QUANTIZED"),
        ({"ignored_layers": ["model.layers.1.self_attn"]}, "E_EXCLUDED_BUT_QUANTIZED"),
    ],
    ids=str,
)
def test_fp8_that_contradicts_its_configuration_is_refused(
    write: Write, changes: dict[str, object], code: str
) -> None:
    with pytest.raises(ApplianceError, match=rf"error\[{code}\]"):
        write("fp8", DENSE, **changes)


def test_packed_weights_under_the_method_fp8_are_refused(
    tmp_path: Path, hollow: ModuleType
) -> None:
    made = hollow.model(DENSE)
    config = DENSE | {"quantization_config": {"quant_method": "fp8"}}

    with pytest.raises(ApplianceError, match=r"error\[E_CONFIG_TENSOR_MISMATCH\]"):
        summarize(hollow.write(tmp_path, config, hollow.quantized(made)))


def test_experts_of_16_bits_on_a_gpu_have_the_plugin_s_product(
    configure: Configure, write: Write
) -> None:
    plan = make_plan(configure(), write("dense", MOE), GPU)

    assert (plan.model.format, plan.model.quantization) == ("dense", "nvfp4")
    assert [each for each in plan.warnings if each.startswith("experts of 8 or 16 bits")]


@pytest.mark.parametrize("config", [DENSE, MOE])
def test_dense_models_on_the_cpu_have_vllm_s_own_products(
    on_cpu: Configure, write: Write, config: dict[str, object]
) -> None:
    plan = make_plan(on_cpu(), write("dense", config), HOST)

    assert plan.model.quantization == "none"
    assert not [each for each in plan.warnings if "ran on the CPU only" in each]


def test_dense_models_without_experts_on_a_gpu_have_vllm_s_own_products(
    configure: Configure, write: Write
) -> None:
    assert make_plan(configure(), write("dense", DENSE), GPU).model.quantization == "none"


def test_groups_of_128_on_a_gpu_are_planned_packed(configure: Configure, write: Write) -> None:
    plan = make_plan(configure(), write("quasar", DENSE), GPU)

    weights, rows = 2 * (ATTENTION + MLP), 2 * (256 + 128 + 128 + 256 + 2 * 384 + 256)
    assert bytes_of(plan, "codes") == weights // 2
    assert bytes_of(plan, "block_scales") == weights // 128 * 2
    assert bytes_of(plan, "globals") == rows * 4
    formulas = {item.name: item.formula for item in plan.memory.ranks[0].items}
    assert formulas["weights.block_scales"].startswith("one FP16 or FP32 for 128 weights")
    assert [each for each in plan.warnings if each.startswith("the engine with groups of 128")]


def test_groups_of_128_cut_over_two_gpus_must_be_whole(configure: Configure, write: Write) -> None:
    loaded = configure(parallel={"mode": "tensor"})

    with pytest.raises(ApplianceError, match=r"E_TP_GROUP.* 384 / 2 = 192"):
        make_plan(loaded, write("quasar", DENSE), assumed_host("2x16GiB-nvlink"))


@pytest.mark.parametrize(
    ("stated", "producer", "is_right"),
    [
        ("fp8", "fp8", True),
        ("dense", "fp8", False),
        ("nvfp4", "fp8", False),
        ("fp8", "quasar", False),
        ("nvfp4", "quasar", True),
        ("fp8", "dense", False),
    ],
)
def test_stated_format_is_held_against_the_checkpoint(
    configure: Configure, write: Write, stated: str, producer: str, *, is_right: bool
) -> None:
    loaded, summary = configure(model={"format": stated}), write(producer, DENSE)

    if is_right:
        assert make_plan(loaded, summary, GPU).model.format == producer.replace("quasar", "nvfp4")
        return
    with pytest.raises(ApplianceError, match=r"error\[E_FORMAT\] "):
        make_plan(loaded, summary, GPU)
