"""Judges `execution.extra_args` without vLLM: by the frozen list of its flags."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from appliance.config.document import shown
from appliance.config.flags import (
    GONE,
    OWNED,
    UNSUPPORTED,
    VLLM_VERSION,
    Flag,
    flag_name,
    known_flags,
)
from appliance.errors import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from appliance.config.execution import ExtraArgument

_NUMBERS = {"int": (int, "an integer"), "float": (int | float, "a number")}


def verify_extra_args(
    arguments: Mapping[str, ExtraArgument], where: Callable[[str], str]
) -> Iterator[tuple[str, Fault]]:
    """An extra argument is a flag of this vLLM that no other key decides, its value of its kind."""
    seen: dict[str, str] = {}
    for name, value in arguments.items():
        key = f"execution.extra_args.{name}"
        flag = flag_name(name)
        fault = _refuse_name(name, where(key)) or _judge_value(flag, value, where(key))
        if fault is None and flag in seen:
            what, fix = f"must be stated once, it is `{seen[flag]}` already", "remove one"
            fault = Fault("FLAG_VALUE", where(key), what, f"`{name}`", fix)
        seen.setdefault(flag, name)
        if fault is not None:
            yield key, fault


def _refuse_name(name: str, place: str) -> Fault | None:
    """Refuse a flag by its name; never shows the value, which may be a secret."""
    flag = flag_name(name)
    base = flag.partition(".")[0]  # vLLM takes `--compilation-config.mode` for a part of a flag
    plain = base.removeprefix("no-")
    if flag.startswith("-"):
        fix = f"write `{flag.lstrip('-').split('=')[0]}` and its value after the colon"
        return Fault("FLAG_UNKNOWN", place, "must be a flag without dashes", f"`{name}`", fix)
    for candidate in (base, plain):
        if candidate in OWNED:
            what = "must not be a flag that the appliance sets"
            fix = f"remove it; it is decided by {OWNED[candidate]}"
            return Fault("FLAG_OWNED", place, what, f"`{name}`", fix)
        if candidate in UNSUPPORTED or candidate.startswith("data-parallel"):
            reason = UNSUPPORTED.get(candidate, UNSUPPORTED["data-parallel-size"])
            what, fix = f"must not be set: {reason}", "remove it"
            return Fault("FLAG_UNSUPPORTED", place, what, f"`{name}`", fix)
    if plain != base and plain in known_flags():
        what, fix = "must be a flag without `no-`", f"write `{plain}: false`"
        return Fault("FLAG_UNKNOWN", place, what, f"`{name}`", fix)
    return None if base in known_flags() else _unknown(name, flag, place)


def _unknown(name: str, flag: str, place: str) -> Fault:
    what = f"must be a flag of vLLM {VLLM_VERSION}"
    if flag in GONE:
        return Fault("FLAG_UNKNOWN", place, what, f"`{name}`", f"remove it: {GONE[flag]}")
    near = difflib.get_close_matches(flag, known_flags(), n=1)
    fix = f"write `{near[0]}` if that is meant, else remove it" if near else "remove it"
    return Fault("FLAG_UNKNOWN", place, what, f"`{name}`", fix)


def _judge_value(name: str, value: ExtraArgument, place: str) -> Fault | None:
    flag = known_flags()[name.partition(".")[0]]
    part = "." in name  # a part of a structured flag has its own type, which only vLLM knows
    expected = None if part else _expected(flag, value)
    if expected is None:
        return None
    fix = f"change the value of `{name}` or remove it"
    return Fault("FLAG_VALUE", place, f"must be {expected}", shown(value), fix)


def _expected(flag: Flag, value: ExtraArgument) -> str | None:
    """Return what the flag takes if the value is not of it, else None."""
    if flag.kind != "value":
        allowed = (True, False) if flag.kind == "toggle" else (True,)
        words = "`true` or `false`" if flag.kind == "toggle" else "`true`, or absent"
        return None if isinstance(value, bool) and value in allowed else words
    if isinstance(value, bool):
        return "a value, not a switch"
    if flag.type in _NUMBERS and not isinstance(value, _NUMBERS[flag.type][0]):
        return _NUMBERS[flag.type][1]
    if flag.choices and str(value) not in flag.choices:
        return f"one of {', '.join(flag.choices)}"
    return "text, not empty" if value == "" else None
