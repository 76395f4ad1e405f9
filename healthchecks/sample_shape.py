"""What every part of a published machine state may be; anything else is no evidence at all.

A value that is read as something it is not ends as a healthy card: a pending flag of `N/A` is not
"no". What a tool printed in place of a value belongs into `read_errors`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

Test = Callable[[Any], bool]
Leaf = tuple[str, Test]
Shape = Leaf | dict[str, Any] | list[Any] | None
"""A leaf with its words, the parts of an object, the one shape of a list's members, or anything."""

FLAGS = frozenset({"enabled", "disabled", "yes", "no", "on", "off", "true", "false"})
REASONS = frozenset(
    {
        "gpu_idle",
        "applications_clocks_setting",
        "application_clocks",
        "sw_power_cap",
        "hw_slowdown",
        "sync_boost",
        "sw_thermal_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake",
        "display_clock_setting",
    }
)
"""Clock-limit reasons as `reason_name` spells them; another one could hide a slowdown."""

_LEVEL = re.compile(r"INTERNAL|PIX|PXB|PHB|NODE|SYS|SOC|NV\d+", re.ASCII)
_LONGEST_VALUE = 60


class RecordError(ValueError):
    """A part of a record cannot be read."""


def reason_name(text: str) -> str:
    """Return a clock-limit reason as live reads spell it; tools print it in several ways."""
    name = re.sub(r"[^a-z]+", "_", text.lower()).strip("_")
    return "hw_power_brake" if name.startswith("hw_power_brake") else name


def is_flag(value: object) -> bool:
    """Tell whether a value says yes or no in a spelling that tools use."""
    return isinstance(value, bool) or (isinstance(value, str) and value.lower() in FLAGS)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_capability(value: object) -> bool:
    return _is_number(value) or (
        isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value, re.ASCII) is not None
    )


def _or_null(words: str, test: Test) -> Leaf:
    return f"{words} or null", lambda value: value is None or test(value)


_COUNT = _or_null("a whole number", _is_count)
_NUMBER = _or_null("a number", _is_number)
_TEXT = _or_null("text", _is_text)
_FLAG = _or_null("Yes, No, Enabled, Disabled, true, false", is_flag)
_INDEX: Leaf = ("a whole number", _is_count)
_ACTIVE: Leaf = ("true or false", lambda value: isinstance(value, bool))
_WORD: Leaf = ("text", _is_text)
_REASON: Leaf = (
    "the name of a clock-limit reason",
    lambda value: isinstance(value, str) and reason_name(value) in REASONS,
)
_DRIVER = _or_null(
    "a driver version", lambda value: isinstance(value, str) and value[:1].isdecimal()
)
_TOPOLOGY = _or_null(
    "PIX, PXB, PHB, NODE, SYS, NV with a number of lanes",
    lambda value: isinstance(value, str) and _LEVEL.fullmatch(value) is not None,
)
_WAYS = _or_null(
    "a status or an object of a status a direction",
    lambda value: (
        isinstance(value, str)
        or (
            isinstance(value, Mapping)
            and bool(cast("Mapping[str, object]", value))
            and all(isinstance(item, str) for item in cast("Mapping[str, object]", value).values())
        )
    ),
)

FACT_OF = {
    "power.draw": "power.draw_w",
    "power_w.draw": "power.draw_w",
    "power_w.limit": "power.limit_w",
    "pcie.width_current": "pcie.width",
    "pcie.gen_current": "pcie.generation",
    "pcie.replays": "pcie.replays",
    "temp_c.gpu": "thermal.gpu_c",
    "temp_c.hbm": "thermal.hbm_c",
    "temp_c.hbm_max": "thermal.hbm_max_c",
    "clock_reasons_active": "thermal.reasons",
    "retired.pending": "retired.pending",
    "retired.sbe": "retired.sbe",
    "retired.dbe": "retired.sbe",
    "pending": "retired.pending",
    "memory_total_mib": "memory",
    "memory_used_mib": "memory",
    "compute_capability": "compute_capability",
    "persistence": "persistence",
    "handle": "handle",
    **{
        f"{prefix}{name}": f"ecc.{name}"
        for prefix in ("", "ecc.")
        for name in (
            *("mode_current", "mode_pending", "volatile_sbe"),
            *("volatile_dbe", "aggregate_sbe", "aggregate_dbe"),
        )
    },
}
"""Name of a value in `read_errors` to the fact that the checks ask for."""

_GPU: dict[str, Any] = {
    "index": _INDEX,
    "product": _TEXT,
    "device_id": _TEXT,
    "compute_capability": _or_null("a compute capability such as 7.0", _is_capability),
    "memory_total_mib": _COUNT,
    "memory_used_mib": _COUNT,
    "persistence": _FLAG,
    "util_gpu_pct": _COUNT,
    "clock_reasons_active": [_REASON],
    "clocks_mhz": dict.fromkeys(("graphics", "graphics_max", "mem", "mem_max"), _NUMBER),
    "ecc": {
        "mode_current": _FLAG,
        "mode_pending": _FLAG,
        **dict.fromkeys(("volatile_sbe", "volatile_dbe", "aggregate_sbe", "aggregate_dbe"), _COUNT),
    },
    "retired": {"sbe": _COUNT, "dbe": _COUNT, "pending": _FLAG},
    "pcie": dict.fromkeys(("gen_current", "gen_max", "width_current", "width_max"), _COUNT)
    | {"replays": _COUNT},
    "temp_c": dict.fromkeys(("gpu", "gpu_max", "hbm", "hbm_max", "shutdown", "slowdown"), _COUNT),
    "power_w": dict.fromkeys(("draw", "limit", "default", "min"), _NUMBER),
    "nvlink": [{"link": _INDEX, "active": _ACTIVE, "speed_gbps": _NUMBER}],
    "read_errors": dict.fromkeys(FACT_OF, _WORD),
    "note": _TEXT,
}
_PAIR: dict[str, Any] = {
    "a": _INDEX,
    "b": _INDEX,
    "topology": _TOPOLOGY,
    "p2p_read": _WAYS,
    "p2p_write": _WAYS,
    "nvlink_lanes": _COUNT,
    "functional_copy": _TEXT,
    "note": _TEXT,
}
_PROSE = ("id", "title", "provenance", "teaches", "not_shown", "expert", "strict", "note")
_RECORD: dict[str, Any] = {
    **dict.fromkeys(_PROSE),
    "schema": _WORD,
    "host": {
        "driver": _DRIVER,
        "driver_loaded": _or_null(*_ACTIVE),
        "cuda_driver": None,
        "environment": None,
        "gpus_expected": _COUNT,
        "gpus_visible": _COUNT,
    },
    "plan_gpus": [_INDEX],
    "gpus": [_GPU],
    "pairs": [_PAIR],
    "kernel": {
        "xids": [{"xid": _INDEX, "gpu": _COUNT, "count": _COUNT, "note": _TEXT}],
        "pcie_aer": [{"kind": _TEXT, "severity": _TEXT, "gpu": _COUNT, "note": _TEXT}],
    },
    "behaviour": [_WORD],
    "verdict_presumes": _TEXT,
}
_MUST_BE_THERE = frozenset(
    {"host", "gpus", "plan_gpus", "index", "xid", "link", "active", "a", "b"}
)


def check_shape(record: Mapping[str, Any]) -> None:
    """Check every part of a record.

    Raises:
        RecordError: If one is missing, of another kind, or of a name that no part has.
    """
    _check(record, _RECORD, "")


def _check(value: object, shape: Shape, where: str) -> None:
    if shape is None:
        return
    if isinstance(shape, tuple):
        words, test = shape
        if not test(value):
            raise RecordError(f"{where} is {_shown(value)}, must be {words}")
    elif value is None and where not in _MUST_BE_THERE and not where.endswith("]"):
        return
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise RecordError(f"{where} is {_shown(value)}, must be a list")
        for number, member in enumerate(cast("list[object]", value)):
            _check(member, shape[0], f"{where}[{number}]")
    else:
        _check_object(value, shape, where)


def _check_object(value: object, shape: dict[str, Any], where: str) -> None:
    if not isinstance(value, Mapping):
        raise RecordError(f"{where} is {_shown(value)}, must be an object")
    parts, prefix = cast("Mapping[str, object]", value), f"{where}." if where else ""
    for name in shape:
        if name in _MUST_BE_THERE and name not in parts:
            raise RecordError(f"{prefix}{name} is missing")
    for name, member in parts.items():
        if name not in shape:
            near = difflib.get_close_matches(name, shape, n=1, cutoff=0.5)
            hint = f"; is {near[0]} meant?" if near else ""
            raise RecordError(f"{prefix}{name} is no part of a record{hint}")
        _check(member, shape[name], f"{prefix}{name}")


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
