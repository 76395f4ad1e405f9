"""Each defect of a checkpoint gives its own code and no other."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.checkpoint.read import summarize
from appliance.errors import ApplianceError

if TYPE_CHECKING:
    Tiny = Any

Q = "model.layers.0.self_attn.q_proj"
K = "model.layers.0.self_attn.k_proj"
O = "model.layers.1.self_attn.o_proj"  # noqa: E741 - the projection's name
DOWN = "model.layers.0.mlp.experts.1.down_proj"


def refusal(root: Path) -> ApplianceError:
    with pytest.raises(ApplianceError) as caught:
        summarize(root)
    return caught.value


def codes_of(root: Path) -> set[str]:
    return {fault.code for fault in refusal(root).faults}


def add(name: str, entry: tuple[str, tuple[int, ...]]) -> Callable[[Tiny], None]:
    return lambda tiny: tiny.tensors.update({name: entry})


def drop(name: str) -> Callable[[Tiny], None]:
    return lambda tiny: tiny.tensors.pop(name) and None


def block(**fields: object) -> Callable[[Tiny], None]:
    return lambda tiny: tiny.quantization.update(fields)


def weights(**fields: object) -> Callable[[Tiny], None]:
    def change(tiny: Tiny) -> None:
        group = tiny.quantization["config_groups"]["group_0"]
        group["weights"] = group["weights"] | fields

    return change


DEFECTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "extra tensor": (add("model.layers.0.mlp.extra.weight", ("F32", (4,))), "E_UNKNOWN_TENSOR"),
    "layer beyond": (add("model.layers.2.mlp.up_proj.weight", ("F32", (4,))), "E_UNKNOWN_TENSOR"),
    "foreign root": (add("encoder.layers.0.weight", ("F32", (4,))), "E_UNKNOWN_TENSOR"),
    "odd layer index": (add("model.layers.x.weight", ("F32", (4,))), "E_UNKNOWN_TENSOR"),
    "unknown part": (add(f"{Q}.weight_g_idx", ("I32", (64,))), "E_UNKNOWN_TENSOR"),
    "no norm": (drop("model.norm.weight"), "E_MISSING_TENSOR"),
    "no layer norm": (drop("model.layers.1.input_layernorm.weight"), "E_MISSING_TENSOR"),
    "no embedding": (drop("model.embed_tokens.weight"), "E_MISSING_TENSOR"),
    "no head": (drop("lm_head.weight"), "E_MISSING_TENSOR"),
    "no codes": (drop(f"{Q}.weight_packed"), "E_MISSING_COMPANION"),
    "no scales": (drop(f"{Q}.weight_scale"), "E_MISSING_COMPANION"),
    "no global": (drop(f"{Q}.weight_global_scale"), "E_MISSING_COMPANION"),
    "rows": (add(f"{Q}.weight_packed", ("U8", (65, 32))), "E_SHAPE"),
    "not codes": (add(f"{Q}.weight_packed", ("I8", (64, 32))), "E_SHAPE"),
    "norm width": (add("model.norm.weight", ("BF16", (65,))), "E_SHAPE"),
    "vocabulary": (add("model.embed_tokens.weight", ("BF16", (99, 64))), "E_SHAPE"),
    "flat scales": (add(f"{Q}.weight_scale", ("F8_E4M3", (256,))), "E_SCALE_SHAPE"),
    "tall scales": (add(f"{Q}.weight_scale", ("F8_E4M3", (128, 4))), "E_SCALE_SHAPE"),
    "two globals": (add(f"{Q}.weight_global_scale", ("F32", (2,))), "E_SCALE_SHAPE"),
    "F16 scales": (add(f"{Q}.weight_scale", ("F16", (64, 4))), "E_SCALE_DTYPE"),
    "F16 global": (add(f"{Q}.weight_global_scale", ("F16", (1,))), "E_SCALE_DTYPE"),
    "MXFP4 scales": (add(f"{Q}.weight_scale", ("U8", (64, 2))), "E_CODEBOOK"),
    "AWQ": (add(f"{Q}.pre_quant_scale", ("F16", (64,))), "E_UNSUPPORTED_ALGO"),
    "SVD": (add(f"{Q}.svdquant_lora_a", ("F16", (64, 4))), "E_UNSUPPORTED_ALGO"),
    "dense linear": (lambda tiny: tiny.make_dense(O), "E_UNQUANTIZED_NOT_EXCLUDED"),
    "FP8 linear": (lambda tiny: tiny.make_fp8(O), "E_CONFIG_TENSOR_MISMATCH"),
    "integer linear": (add("lm_head.weight", ("I8", (100, 64))), "E_CONFIG_TENSOR_MISMATCH"),
    "excluded": (block(ignore=["lm_head", O]), "E_EXCLUDED_BUT_QUANTIZED"),
    "excluded by expression": (
        block(ignore=["lm_head", "re:.*o_proj"]),
        "E_EXCLUDED_BUT_QUANTIZED",
    ),
    "no metadata": (lambda tiny: tiny.config.pop("quantization_config"), "E_NO_QUANT_METADATA"),
    "method": (block(quant_method="fp4x"), "E_UNKNOWN_METHOD"),
    "no method": (block(quant_method=None), "E_UNKNOWN_METHOD"),
    "empty method": (block(quant_method=""), "E_UNKNOWN_METHOD"),
    "other method": (block(quant_method="awq"), "E_UNSUPPORTED_ALGO"),
    "other exporter": (
        block(quant_method="modelopt", quant_algo="NVFP4"),
        "E_CONFIG_TENSOR_MISMATCH",
    ),
    "no algorithm": (block(quant_method="modelopt"), "E_UNSUPPORTED_ALGO"),
    "no groups": (block(config_groups={}), "E_CONFIG"),
    "rotation": (block(transform_config={"R1": {}}), "E_UNSUPPORTED_ALGO"),
    "sparsity": (block(sparsity_config={"format": "sparse-24"}), "E_UNSUPPORTED_ALGO"),
    "group size": (weights(group_size=32), "E_GROUP_SIZE"),
    "integers": (weights(type="int"), "E_UNSUPPORTED_ALGO"),
    "six bits": (weights(num_bits=6), "E_UNSUPPORTED_ALGO"),
    "strategy": (weights(strategy="group"), "E_UNSUPPORTED_ALGO"),
    "asymmetric": (weights(symmetric=False), "E_UNSUPPORTED_ALGO"),
    "bad expression": (block(ignore=["lm_head", "re:("]), "E_CONFIG"),
    "long expression": (block(ignore=["lm_head", "re:" + "a" * 3000]), "E_CONFIG"),
    "architecture": (
        lambda tiny: tiny.config.update(architectures=["GPT2LMHeadModel"]),
        "E_ARCHITECTURE",
    ),
    "no architecture": (lambda tiny: tiny.config.update(architectures=[]), "E_CONFIG"),
    "endless layers": (lambda tiny: tiny.config.update(num_hidden_layers=2**40), "E_CONFIG"),
    "endless rope": (
        lambda tiny: tiny.config.update(rope_scaling={"type": "linear", "factor": float("inf")}),
        "E_CONFIG",
    ),
    "list for a group size": (weights(group_size=[16]), "E_GROUP_SIZE"),
    "no hidden size": (lambda tiny: tiny.config.pop("hidden_size"), "E_CONFIG"),
    "text for a number": (lambda tiny: tiny.config.update(hidden_size="64"), "E_CONFIG"),
    "boolean for a number": (lambda tiny: tiny.config.update(num_hidden_layers=True), "E_CONFIG"),
    "negative": (lambda tiny: tiny.config.update(vocab_size=-1), "E_CONFIG"),
    "number for a flag": (lambda tiny: tiny.config.update(tie_word_embeddings=1), "E_CONFIG"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_gives_its_code_and_no_other(tiny: Tiny, defect: str) -> None:
    change, code = DEFECTS[defect]
    change(tiny)

    assert codes_of(tiny.write()) == {code}


def test_missing_expert_is_named(tiny_moe: Tiny) -> None:
    for part in ("weight_packed", "weight_scale", "weight_global_scale"):
        del tiny_moe.tensors[f"{DOWN}.{part}"]

    error = refusal(tiny_moe.write())

    assert [(fault.code, fault.where) for fault in error.faults] == [("E_MISSING_EXPERT", DOWN)]


def test_parts_of_a_fused_site_in_two_formats_are_refused(tiny: Tiny) -> None:
    tiny.make_dense(K)
    tiny.quantization["ignore"] = ["lm_head", K]

    assert codes_of(tiny.write()) == {"E_FUSED_MIXED"}


def test_experts_of_a_layer_in_two_formats_are_refused(tiny_moe: Tiny) -> None:
    tiny_moe.make_dense(DOWN)
    tiny_moe.quantization["ignore"] = [*tiny_moe.quantization["ignore"], DOWN]

    assert codes_of(tiny_moe.write()) == {"E_FUSED_MIXED"}


@pytest.mark.parametrize("kind", ["absent", "file"])
def test_path_that_is_no_directory_is_named_itself(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.write_bytes(b"text")

    with pytest.raises(ApplianceError) as caught:
        summarize(path)

    fault = caught.value.faults[0]
    assert (fault.code, fault.where) == ("E_PATH", str(path))


def test_experts_counted_by_the_name_of_newer_exports_are_read(tiny_moe: Tiny) -> None:
    tiny_moe.config["num_local_experts"] = tiny_moe.config.pop("num_experts")

    assert summarize(tiny_moe.write()).geometry.num_experts == 3


def test_repeated_fault_is_listed_a_few_times_and_counted(tiny_moe: Tiny) -> None:
    tiny_moe.config["num_experts"] = 20
    tiny_moe.tensors["model.layers.0.mlp.gate.weight"] = ("BF16", (20, 64))
    tiny_moe.tensors["model.layers.1.mlp.gate.weight"] = ("BF16", (20, 64))

    faults = refusal(tiny_moe.write()).faults

    assert len(faults) == 13
    assert faults[-1].value == str(2 * 17 * 3)


VALUES: list[object] = [None, True, 0, -1, 3, 2**70, 1.5, float("nan"), "", "x", "re:("]
VALUES += [[], {}, [1], ["a"], [[1]], {"a": 1}, {"a": {"b": []}}, "modelopt", "NVFP4"]


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside."""
    inner = value.items() if isinstance(value, dict) else []
    inner = enumerate(value) if isinstance(value, list) else inner
    return [place for key, item in inner for place in [(*path, key), *places(item, (*path, key))]]


@settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_other_value_in_the_configuration_ends_in_a_fault_or_not_at_all(
    tiny_moe: Tiny, data: st.DataObject
) -> None:
    root = tiny_moe.root if tiny_moe.root.exists() else tiny_moe.write()
    changed = copy.deepcopy(tiny_moe.config)
    *path, last = data.draw(st.sampled_from(places(changed)))
    inner: Any = changed
    for key in path:
        inner = inner[key]
    inner[last] = data.draw(st.sampled_from(VALUES))
    (root / "config.json").write_text(json.dumps(changed))

    try:
        summary = summarize(root)
    except ApplianceError:
        return

    assert summary.tensor_count == len(tiny_moe.tensors)
