"""Which way the weights of this engine are computed with."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar, cast

from appliance.checkpoint.rules import Lenient
from appliance.errors import ApplianceError, ExitCode, Fault

SETTING = "execution.weights"
LENIENT = "model.lenient"

_Choice = TypeVar("_Choice", bound=StrEnum)


class WeightRoute(StrEnum):
    """Ways to compute with NVFP4 weights."""

    DEQUANTIZED = "dequantized"  # decoded once after loading, 2 or 4 bytes a weight from then on
    FUSED = "fused"  # kept at 4.5 bits, decoded inside the kernels


def wanted_route(additional_config: Mapping[str, Any]) -> WeightRoute:
    """Return the route that the plan asks for in the engine's `--additional-config`.

    The plan writes `{"nvfp4": {"weights": "fused" | "dequantized"}}`; without it, `fused`.

    Raises:
        ApplianceError: If the value is neither.
    """
    return _given(additional_config, "weights", WeightRoute.FUSED, ("WEIGHT_ROUTE", SETTING))


def wanted_lenience(additional_config: Mapping[str, Any]) -> Lenient:
    """Return what the plan does with modules that are excluded and packed all the same.

    The plan writes `{"nvfp4": {"lenient": "tensors-win"}}`; without it, `none`.

    Raises:
        ApplianceError: If the value is neither.
    """
    return _given(additional_config, "lenient", Lenient.NONE, ("CONFIG_VALUE", LENIENT))


def _given(
    additional_config: Mapping[str, Any], key: str, default: _Choice, named: tuple[str, str]
) -> _Choice:
    """Return the plan's choice for a key; `named` are code and place of a value that is none."""
    section = additional_config.get("nvfp4")
    is_section = isinstance(section, Mapping)
    given = cast("Mapping[str, Any]", section).get(key) if is_section else None
    choices = type(default)
    try:
        return default if given is None else choices(str(given))
    except ValueError:
        code, where = named
        allowed = ", ".join(choices)
        fault = Fault(code, where, f"must be one of {allowed}", repr(given), "correct it")
        raise ApplianceError(ExitCode.CONFIG, fault) from None


def choose_route(device: str, wanted: WeightRoute, kernels: frozenset[WeightRoute]) -> WeightRoute:
    """Decide the route of this engine.

    Args:
        device: `cpu` or `cuda`.
        wanted: What the plan asks for. On the CPU the reference library decodes once, whatever is
            asked: decoding again for each product would cost a hundred times the product.
        kernels: Routes that the installed GPU library can compute; empty without the library.

    Raises:
        ApplianceError: If the GPU library is missing or cannot do what the plan asks for.
    """
    if device == "cpu":
        return WeightRoute.DEQUANTIZED
    if wanted in kernels:
        return wanted
    able = ", ".join(sorted(kernels)) or "no libnvfp4_sm70.so"
    fault = Fault(
        "WEIGHT_ROUTE",
        SETTING,
        f"{wanted} needs a GPU library that can compute it",
        able,
        "install the library of this release, or set execution.device: cpu",
    )
    raise ApplianceError(ExitCode.ENGINE_START, fault)
