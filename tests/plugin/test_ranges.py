"""What FP16 cannot hold is found in every tensor that the engine holds in FP16, and only there."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest
import torch

from appliance.errors import ApplianceError
from appliance.vllm_plugin.ranges import FLUSHED, FP16_MAX, RangeWatch, extent

NORM = "model.layers.3.input_layernorm.weight"
DECAY = "model.layers.3.linear_attn.A_log"
Named = dict[str, torch.Tensor]


def every_bf16() -> torch.Tensor:
    """Return every number of BF16."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    return values[~values.isnan()]


def single(value: float, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor of ones with one other value, by its place [2, 5]."""
    made = torch.ones(4, 8, dtype=kind)
    made[2, 5] = value
    return made


def watched(tensors: Named, held: Named | None = None) -> RangeWatch:
    """Return a watch that has seen the tensors arrive in a model of FP16."""
    model = held or {name: tensor.half() for name, tensor in tensors.items()}
    watch = RangeWatch(model.items())
    given: Iterable[tuple[str, torch.Tensor]] = list(watch.over(tensors.items()))
    assert dict(given) == tensors
    return watch


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_extent_of_every_bf16_number_is_what_a_cast_does(kind: torch.dtype) -> None:
    values = every_bf16().to(kind)

    found = extent(values)

    halves = values.half()
    assert found.too_large == int(halves.isinf().sum())
    assert found.flushed == int(((halves == 0) & (values != 0)).sum()) > 0
    assert abs(found.worst) == float("inf")


@pytest.mark.parametrize(
    ("value", "too_large", "flushed"),
    [
        (65280.0, 0, 0),
        (65536.0, 1, 0),
        (-3e38, 1, 0),
        (FLUSHED, 0, 1),
        (-FLUSHED, 0, 1),
        (FLUSHED * 1.5, 0, 0),
        (0.0, 0, 0),
        (-0.0, 0, 0),
        (float("nan"), 0, 0),
    ],
)
def test_extent_at_the_ends_of_fp16(value: float, too_large: int, flushed: int) -> None:
    for kind in (torch.bfloat16, torch.float32):
        found = extent(single(value, kind))

        assert (found.too_large, found.flushed, found.count) == (too_large, flushed, 32)
        assert found.place == ((2, 5) if too_large else ())
        assert found.worst == (single(value, kind)[2, 5] if too_large else 0.0)


def test_extent_of_a_long_tensor_finds_the_worst_of_several_chunks() -> None:
    values = torch.ones(3, 1 << 18)
    values[0, 7], values[2, 9], values[1, 1] = 1e5, -4e5, 1e-9

    found = extent(values)

    assert (found.too_large, found.worst, found.place, found.flushed) == (2, -4e5, (2, 9), 1)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_norm_beyond_fp16_is_refused_with_name_value_and_place(kind: torch.dtype) -> None:
    watch = watched({NORM: single(-70144.0, kind)})

    with pytest.raises(ApplianceError) as caught:
        watch.finish()

    (fault,) = caught.value.faults
    assert (fault.code, fault.where) == ("E_FP16_RANGE", NORM)
    assert fault.value == "-70144 at [2, 5]"
    assert fault.fix.startswith("serve it with execution.device: cpu")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.linear_attn.conv1d.weight",
        "model.layers.0.linear_attn.dt_bias",
        "model.layers.0.mlp.gate.weight",
        "model.embed_tokens.weight",
        "model.layers.1.mlp.experts.gate_up_proj",
    ],
)
def test_every_kind_of_tensor_is_looked_at(name: str) -> None:
    with pytest.raises(ApplianceError, match=r"error\[E_FP16_RANGE\] " + name):
        watched({name: single(1e6)}).finish()


def test_what_the_model_holds_in_fp32_may_have_any_value() -> None:
    stored = {DECAY: single(1e6), NORM: single(1.0)}
    held = {DECAY: stored[DECAY].float(), NORM: stored[NORM].half()}

    watched(stored, held).finish()


def test_what_the_model_has_no_use_for_may_have_any_value() -> None:
    stored = {"mtp.layers.0.input_layernorm.weight": single(1e6), NORM: single(1.0)}

    watched(stored, {NORM: stored[NORM].half()}).finish()


def test_model_of_fp32_is_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    stored = {NORM: torch.full((64,), 1e-9)}

    watched(stored, stored).finish()

    assert caplog.text == ""


@pytest.mark.parametrize("part", ["weight_global_scale", "weight_scale_inv", "input_scale"])
def test_scales_are_not_looked_at(part: str) -> None:
    name = f"model.layers.0.mlp.down_proj.{part}"

    watched({name: single(1e6, torch.float32), NORM: single(1.0)}).finish()


def test_weights_that_become_zero_are_told_once_with_the_worst_share(
    caplog: pytest.LogCaptureFixture,
) -> None:
    few, many = torch.ones(1000), torch.ones(1000)
    few[:20], many[:250] = 1e-9, 1e-9
    unseen = torch.ones(1000)
    unseen[:9] = 1e-9
    names = ["a.norm.weight", "b.norm.weight", "c.norm.weight"]

    with caplog.at_level(logging.WARNING, "vllm.nvfp4"):
        watched(dict(zip(names, (few, many, unseen), strict=True))).finish()

    assert [record.getMessage() for record in caplog.records] == [
        "nvfp4.flushed code=W_FP16_FLUSHED name=b.norm.weight share=0.2500 tensors=2"
    ]


def test_weights_stored_as_fp16_are_taken_as_they_are() -> None:
    watched({NORM: torch.full((4,), FP16_MAX, dtype=torch.float16)}).finish()
