"""Stacked experts come out one by one, whichever way round they are stored."""

from __future__ import annotations

import pytest
import torch

from appliance.checkpoint.rules import Form, Rules
from appliance.errors import ApplianceError
from appliance.vllm_plugin.inventory import (
    MODELOPT_NAMES,
    QUASAR_NAMES,
    Found,
    fp8_scale_name,
    modules_of,
    resolve,
)
from appliance.vllm_plugin.stacks import Stacks

EXPERTS, HIDDEN, WIDTH = 3, 32, 16
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
RULES = Rules("none", "nowhere", "nothing")


def stack(*, turned: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made: dict[str, torch.Tensor] = {}
    for leaf, rows, columns in (("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
        codes = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=generator)
        scales = torch.randint(0, 127, (EXPERTS, rows, columns // 16), generator=generator)
        made[leaf] = codes.to(torch.uint8)
        made[f"{leaf}_weight_scale"] = scales.to(torch.uint8)
        made[f"{leaf}_weight_scale_2"] = torch.rand(EXPERTS, generator=generator)
    if turned:
        made = {
            name: each.transpose(1, 2).contiguous() if each.dim() == 3 else each
            for name, each in made.items()
        }
    return made


def stacks_of(made: dict[str, torch.Tensor]) -> Stacks:
    leaves = ("gate_up_proj", "down_proj")
    return Stacks(
        {
            leaf: (tuple(made[leaf].shape), tuple(made[f"{leaf}_weight_scale"].shape))
            for leaf in leaves
        }
    )


@pytest.mark.parametrize("turned", [False, True])
def test_stacks_split_into_the_same_experts_either_way_round(turned: bool) -> None:
    upright, made = stack(turned=False), stack(turned=turned)

    found = dict(stacks_of(made).split(made.items(), hidden=HIDDEN, width=WIDTH, names=NAMES))

    assert len(found) == EXPERTS * 3 * 3
    for expert in range(EXPERTS):
        gate_up = upright["gate_up_proj"][expert]
        assert torch.equal(found[f"{expert}.gate_proj.weight"], gate_up[:WIDTH])
        assert torch.equal(found[f"{expert}.up_proj.weight"], gate_up[WIDTH:])
        scales = upright["gate_up_proj_weight_scale"][expert]
        assert torch.equal(found[f"{expert}.up_proj.weight_scale"], scales[WIDTH:])
        factor = upright["gate_up_proj_weight_scale_2"][expert]
        assert found[f"{expert}.gate_proj.weight_scale_2"] == factor
        assert found[f"{expert}.up_proj.weight_scale_2"] == factor
        assert torch.equal(found[f"{expert}.down_proj.weight"], upright["down_proj"][expert])


def test_tensors_of_single_experts_pass_untouched() -> None:
    single = [("0.gate_proj.weight", torch.zeros(2)), ("gate.bias", torch.zeros(1))]

    assert list(Stacks().split(single, hidden=1, width=1, names=NAMES)) == single


@pytest.mark.parametrize("turned", [False, True])
def test_headers_of_stacks_resolve_to_nvfp4(turned: bool) -> None:
    made = stack(turned=turned)
    kinds = {3: {"w": "U8", "s": "F8_E4M3"}, 1: {"w": "F32", "s": "F32"}}
    modules = modules_of(
        (
            f"m.experts.{name}",
            Found(kinds[each.dim()]["s" if "scale" in name else "w"], tuple(each.shape), "f"),
        )
        for name, each in made.items()
    )

    found = resolve(["m.experts.gate_up_proj", "m.experts.down_proj"], "m.experts", modules, RULES)

    assert (found.form, found.names) == (Form.NVFP4, MODELOPT_NAMES)


@pytest.mark.parametrize(
    ("dtype", "blocks", "group"), [("F16", 2, 128), ("F32", 2, 128), ("F8_E4M3", 16, 16)]
)
def test_quasar_resolves_to_the_group_of_its_scales(dtype: str, blocks: int, group: int) -> None:
    modules = {
        "m": {
            "qweight": Found("I32", (8, 32), "f"),
            "weight_scales": Found(dtype, (8, blocks), "f"),
        }
    }

    names = resolve(["m"], "m", modules, RULES).names

    assert names is not None
    assert (names.codes, names.group, names.scale_dtype) == (QUASAR_NAMES.codes, group, dtype)
    assert (names.has_words, names.has_global) == (True, False)


def test_parts_of_two_layouts_are_refused() -> None:
    modules = {
        "q": {"qweight": Found("I32", (8, 32), "f"), "weight_scales": Found("F16", (8, 2), "f")},
        "k": {
            "weight": Found("U8", (8, 128), "f"),
            "weight_scale": Found("F8_E4M3", (8, 16), "f"),
            "weight_scale_2": Found("F32", (), "f"),
        },
    }

    with pytest.raises(ApplianceError, match="E_FUSED_MIXED"):
        resolve(["q", "k"], "qkv", modules, RULES)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_fp8_scales_have_either_name(name: str) -> None:
    modules = {"m": {"weight": Found("F8_E4M3", (200, 300), "f"), name: Found("F32", (), "f")}}

    assert fp8_scale_name(["m"], modules) == name


def test_fp8_parts_with_scales_of_two_names_are_refused() -> None:
    weight = Found("F8_E4M3", (8, 8), "f")
    names = {"q": "weight_scale", "k": "weight_scale_inv"}
    modules = {
        part: {"weight": weight, name: Found("F32", (), "f")} for part, name in names.items()
    }

    with pytest.raises(ApplianceError, match="E_FUSED_MIXED"):
        fp8_scale_name(["q", "k"], modules)


def test_fp8_without_scales_is_refused() -> None:
    modules = {"m": {"weight": Found("F8_E4M3", (8, 8), "f")}}

    with pytest.raises(ApplianceError, match=r"error\[E_MISSING_COMPANION\] m\.weight_scale:"):
        fp8_scale_name(["m"], modules)
