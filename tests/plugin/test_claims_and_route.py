"""Which checkpoints are claimed, and which way their weights are computed with."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.checkpoint.rules import Lenient
from appliance.errors import ApplianceError
from appliance.vllm_plugin import ops
from appliance.vllm_plugin.claims import is_served
from appliance.vllm_plugin.route import (
    WeightRoute,
    choose_route,
    wanted_lenience,
    wanted_route,
)

FP4 = {"num_bits": 4, "type": "float", "group_size": 16}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "group_size": 128}


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "modelopt_fp4", "quant_algo": "nvfp4"},
        {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION"},
        {"quant_method": "", "quantization": {"quant_algo": "NVFP4"}},
        {"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "W4A16_NVFP4"}},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": FP4}}},
        {"quant_method": "compressed_tensors", "config_groups": {"g": {"weights": FP4}}},
        {"quant_method": "nvfp4"},
        {"quant_method": "fp8"},
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8_PB_WO"}},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": FP8}}},
    ],
)
def test_claims_nvfp4_and_fp8_of_every_producer(config: dict[str, Any]) -> None:
    assert is_served(config)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        {"quant_method": "modelopt", "quant_algo": "INT8"},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": INT4}}},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": None}}},
        {"quant_method": "compressed-tensors"},
    ],
)
def test_claims_nothing_else(config: dict[str, Any]) -> None:
    assert not is_served(config)


@pytest.mark.parametrize("wanted", WeightRoute)
def test_route_on_the_cpu_is_decoded_once_whatever_is_asked(wanted: WeightRoute) -> None:
    assert choose_route("cpu", wanted, frozenset()) is WeightRoute.DEQUANTIZED


@pytest.mark.parametrize("wanted", WeightRoute)
def test_route_on_a_gpu_without_the_library_is_refused(wanted: WeightRoute) -> None:
    with pytest.raises(
        ApplianceError, match=r"error\[WEIGHT_ROUTE\] execution\.weights: "
    ) as caught:
        choose_route("cuda", wanted, frozenset())

    assert "libnvfp4_sm70.so" in str(caught.value)
    assert caught.value.exit_code == 40


def test_route_on_a_gpu_is_what_the_library_can() -> None:
    able = frozenset({WeightRoute.FUSED})

    assert choose_route("cuda", WeightRoute.FUSED, able) is WeightRoute.FUSED
    with pytest.raises(ApplianceError, match="got fused;"):
        choose_route("cuda", WeightRoute.DEQUANTIZED, able)


@pytest.mark.parametrize(
    ("given", "route"),
    [
        ({}, WeightRoute.FUSED),
        ({"other": 1}, WeightRoute.FUSED),
        ({"nvfp4": {"weights": "fused"}}, WeightRoute.FUSED),
        ({"nvfp4": {"weights": "dequantized"}}, WeightRoute.DEQUANTIZED),
    ],
)
def test_route_wanted_is_what_the_plan_wrote(given: dict[str, Any], route: WeightRoute) -> None:
    assert wanted_route(given) is route


def test_route_unknown_word_is_refused() -> None:
    with pytest.raises(ApplianceError, match="must be one of dequantized, fused, got 'packed';"):
        wanted_route({"nvfp4": {"weights": "packed"}})


def test_routes_of_a_gpu_need_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there, able in ((True, frozenset(WeightRoute)), (False, frozenset())):
        monkeypatch.setattr(ops, "has_gpu_library", lambda found=is_there: found)

        assert ops.routes("cuda") == able
        assert ops.routes("cpu") == {WeightRoute.DEQUANTIZED}


@pytest.mark.parametrize("settings", [{}, {"nvfp4": {}}, {"nvfp4": {"weights": "fused"}}])
def test_lenience_is_none_unless_the_plan_says_so(settings: dict[str, Any]) -> None:
    assert wanted_lenience(settings) is Lenient.NONE


def test_lenience_of_the_plan_is_taken_and_another_word_refused() -> None:
    assert wanted_lenience({"nvfp4": {"lenient": "tensors-win"}}) is Lenient.TENSORS_WIN
    with pytest.raises(ApplianceError, match=r"error\[CONFIG_VALUE\] model\.lenient: "):
        wanted_lenience({"nvfp4": {"lenient": "always"}})
