"""How modules are stored by their headers, and whether the config agrees."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from appliance.checkpoint.patterns import expression_matcher, shell_matcher
from appliance.checkpoint.rules import Form, Group, Lenient, Rules, Scheme
from appliance.errors import ApplianceError
from appliance.vllm_plugin.inventory import (
    COMPRESSED_TENSORS_NAMES,
    MODELOPT_NAMES,
    Found,
    Modules,
    modules_of,
    resolve,
)

EVERYTHING = (Group(expression_matcher(["Linear"]), Scheme(Form.NVFP4)),)
LEAVES = ("m.q_proj", "m.k_proj", "m.v_proj")


def modelopt(*ignore: str) -> Rules:
    return Rules("modelopt", "config.json", "NVFP4", 16, shell_matcher(list(ignore)), EVERYTHING)


def compressed_tensors(*ignore: str) -> Rules:
    matcher = expression_matcher(list(ignore))
    return Rules("compressed-tensors", "config.json", "nvfp4", 16, matcher, EVERYTHING)


def packed(codes: str, globals_: str) -> dict[str, Found]:
    return {
        codes: Found("U8", (32, 32), "a.safetensors"),
        "weight_scale": Found("F8_E4M3", (32, 4), "a.safetensors"),
        globals_: Found("F32", (1,), "a.safetensors"),
    }


def stored(**leaves: str) -> Modules:
    """Return modules `m.NAME`, each stored as `mo`, `ct`, `fp8` or `dense`."""
    ways = {
        "mo": packed("weight", "weight_scale_2"),
        "ct": packed("weight_packed", "weight_global_scale"),
        "fp8": {"weight": Found("F8_E4M3", (32, 64), "b.safetensors")},
        "dense": {"weight": Found("BF16", (32, 64), "b.safetensors")},
    }
    return {f"m.{name}": dict(ways[way]) for name, way in leaves.items()}


def refusal(code: str, where: str) -> pytest.RaisesExc[ApplianceError]:
    return pytest.raises(ApplianceError, match=re.escape(f"error[{code}] {where}:"))


@pytest.mark.parametrize(
    ("way", "rules", "names"),
    [("mo", modelopt(), MODELOPT_NAMES), ("ct", compressed_tensors(), COMPRESSED_TENSORS_NAMES)],
)
def test_resolve_packed_parts_give_the_names_of_their_producer(
    way: str, rules: Rules, names: object
) -> None:
    found = resolve(LEAVES, "m.qkv", stored(q_proj=way, k_proj=way, v_proj=way), rules)

    assert (found.form, found.names, found.leaves) == (Form.NVFP4, names, LEAVES)


def test_resolve_excluded_dense_parts_are_dense() -> None:
    modules = stored(q_proj="dense", k_proj="dense", v_proj="dense")

    found = resolve(LEAVES, "m.qkv", modules, compressed_tensors("re:m\\..*_proj"))

    assert found.form is Form.DENSE


@pytest.mark.parametrize("rules", [modelopt("m.q_proj"), compressed_tensors("re:m.q_proj")])
def test_resolve_excluded_but_packed_is_refused(rules: Rules) -> None:
    way = "mo" if rules.producer == "modelopt" else "ct"

    with refusal("E_EXCLUDED_BUT_QUANTIZED", "m.q_proj") as caught:
        resolve(("m.q_proj",), "m.q_proj", stored(q_proj=way), rules)

    assert "in a.safetensors" in str(caught.value)
    assert "config.json says dense" in str(caught.value)


def test_resolve_dense_but_not_excluded_is_refused() -> None:
    with refusal("E_UNQUANTIZED_NOT_EXCLUDED", "m.q_proj.weight") as caught:
        resolve(("m.q_proj",), "m.q_proj", stored(q_proj="dense"), modelopt("lm_head"))

    assert "add m.q_proj to the exclude list" in str(caught.value)


def test_resolve_parts_of_two_forms_are_refused() -> None:
    modules = stored(q_proj="ct", k_proj="dense", v_proj="ct")

    with refusal("E_FUSED_MIXED", "m.qkv") as caught:
        resolve(LEAVES, "m.qkv", modules, compressed_tensors("m.k_proj"))

    assert "m.k_proj: dense" in str(caught.value)


def test_resolve_without_metadata_the_tensors_decide() -> None:
    found = resolve(("m.q_proj",), "m.q_proj", stored(q_proj="mo"), Rules("none", "", "nothing"))

    assert found.form is Form.NVFP4


def test_resolve_form_other_than_stated_is_refused() -> None:
    with refusal("E_CONFIG_TENSOR_MISMATCH", "m.q_proj"):
        resolve(("m.q_proj",), "m.q_proj", stored(q_proj="fp8"), modelopt())


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_global_scale"])
def test_resolve_missing_companion_is_named(suffix: str) -> None:
    modules = stored(q_proj="ct")
    del modules["m.q_proj"][suffix]

    with refusal("E_MISSING_COMPANION", f"m.q_proj.{suffix}"):
        resolve(("m.q_proj",), "m.q_proj", modules, compressed_tensors())


@pytest.mark.parametrize(
    ("dtype", "shape", "code"),
    [("F32", (32, 4), "E_SCALE_DTYPE"), ("F8_E4M3", (32, 2), "E_SCALE_SHAPE")],
)
def test_resolve_wrong_scales_are_refused(dtype: str, shape: tuple[int, ...], code: str) -> None:
    modules = stored(q_proj="ct")
    modules["m.q_proj"]["weight_scale"] = Found(dtype, shape, "a.safetensors")

    with refusal(code, "m.q_proj.weight_scale"):
        resolve(("m.q_proj",), "m.q_proj", modules, compressed_tensors())


@pytest.mark.parametrize(
    "suffix", ["pre_quant_scale", "svdquant_lora_a", "forward_hadamard_matrix"]
)
def test_resolve_tensor_that_changes_the_meaning_is_refused(suffix: str) -> None:
    modules = stored(q_proj="ct")
    modules["m.q_proj"][suffix] = Found("F32", (64,), "a.safetensors")

    with refusal("E_UNSUPPORTED_ALGO", f"m.q_proj.{suffix}"):
        resolve(("m.q_proj",), "m.q_proj", modules, compressed_tensors())


def test_resolve_missing_expert_is_named() -> None:
    leaves = [f"m.experts.{e}.up_proj" for e in range(4)]
    modules = {leaf: packed("weight", "weight_scale_2") for leaf in leaves if ".2." not in leaf}

    with refusal("E_MISSING_EXPERT", "m.experts.2.up_proj") as caught:
        resolve(leaves, "m.experts", modules, modelopt())

    assert "1 of 4 parts" in str(caught.value)


def test_modules_of_sorts_tensors_by_owner() -> None:
    one, other = Found("U8", (1, 8), "a"), Found("F32", (), "a")

    modules = modules_of([("m.q.weight", one), ("m.q.weight_scale_2", other), ("top", one)])

    assert modules == {"m.q": {"weight": one, "weight_scale_2": other}, "": {"top": one}}


def test_resolve_excluded_but_packed_is_packed_where_tensors_win() -> None:
    rules = replace(compressed_tensors("m.k_proj"), lenient=Lenient.TENSORS_WIN)
    modules = stored(q_proj="ct", k_proj="ct", v_proj="ct")

    found = resolve(LEAVES, "m.qkv", modules, rules)

    assert (found.form, found.names) == (Form.NVFP4, COMPRESSED_TENSORS_NAMES)
    assert found.overruled == ("m.k_proj",)


def test_resolve_dense_and_not_excluded_is_refused_where_tensors_win() -> None:
    rules = replace(compressed_tensors(), lenient=Lenient.TENSORS_WIN)

    with refusal("E_UNQUANTIZED_NOT_EXCLUDED", "m.k_proj.weight"):
        resolve(LEAVES[1:2], "m.k_proj", stored(k_proj="dense"), rules)
