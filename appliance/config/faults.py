"""Turns what pydantic refuses into one fault a key: line, what may stand there, what does."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.config.describe import allowed_keys, default_at, every_entry, expected_at
from appliance.config.document import Value, shown
from appliance.config.flags import GONE, OWNED, flag_name
from appliance.errors import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ELSEWHERE = {
    "bind": "server.host",
    "context_length": "model.max_model_len",
    "cpu_threads": "nothing; the CPU engine shares the allowed cores out",
    "ipc": "memory.shm_size; the host's shared memory is not used",
    "log_level": "logging.level",
    "pipeline": "parallel.mode: pipeline",
    "pp": "parallel.mode: pipeline",
    "tensor": "parallel.mode: tensor",
    "tp": "parallel.mode: tensor",
}
"""Names operators bring along that no close key would be found for."""

ADVISED = 64
"""Unknown keys that get a nearest name, 1 ms each; a file with more is no configuration."""


@dataclass(frozen=True)
class Refused:
    """One key the schema refused.

    Attributes:
        key: Dotted key; for a missing key, the one that should be there.
        fault: The message.
    """

    key: str
    fault: Fault


def schema_faults(
    errors: Iterable[Any], data: dict[str, Value], where: Callable[[str], str]
) -> list[Refused]:
    """Return one fault a key for the errors of a pydantic validation.

    Args:
        errors: What `ValidationError.errors()` returned.
        data: The values that were validated.
        where: Returns `file:line key` of a key.
    """
    found: dict[str, tuple[str, str, Value]] = {}
    for error in errors:
        kind = str(error["type"])
        key, value = _locate(data, error["loc"], missing=kind == "missing")
        if key not in found:
            name = str(error["loc"][-1]) if error["loc"] else ""
            found[key] = (kind, name, value)
    outermost = [key for key in found if not any(above in found for above in _above(key))]
    advised = set(outermost[:ADVISED])
    faults: list[Refused] = []
    for key in outermost:
        kind, name, value = found[key]
        if kind == "extra_forbidden":
            fault = _unknown_key(key, name, where, advised=key in advised)
        else:
            fault = _fault(kind, key, value, where)
        faults.append(Refused(key, fault))
    return faults


def _locate(data: Value, loc: tuple[int | str, ...], *, missing: bool) -> tuple[str, Value]:
    """Return key and value of an error; parts of `loc` that name a union's branch are skipped."""
    key, value = "", data
    for part in loc:
        if isinstance(value, dict) and part in value:
            key = f"{key}.{part}" if key else str(part)
            value = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            key = f"{key}[{part}]"
            value = value[part]
    if missing:
        return (f"{key}.{loc[-1]}" if key else str(loc[-1])), None
    return key, value


def _above(key: str) -> Iterator[str]:
    """Yield the sections and lists that a key stands in."""
    return (key[:at] for at, letter in enumerate(key) if letter in ".[" and at)


def _fault(kind: str, key: str, value: Value, where: Callable[[str], str]) -> Fault:
    if kind == "missing":
        return Fault(
            "CONFIG_MISSING_KEY",
            where(key),
            f"must be {expected_at(key)}",
            "nothing",
            "add the key",
        )
    if kind == "too_long":
        what, fix = "must hold at most 64 entries", "remove some"
        return Fault("CONFIG_VALUE", where(key), what, "more", fix)
    what = f"must be {expected_at(key)}"
    return Fault("CONFIG_VALUE", where(key), what, shown(value), _change(key, value, what))


def _change(key: str, value: Value, what: str) -> str:
    """Return what to do about a value that may not stand at a key."""
    default = default_at(key)
    if what.startswith("must be a mapping with"):
        write = "write its keys below it"
        return write if default is None else f"{write}, or remove the line"
    change = "change it"
    single = isinstance(value, (str, int)) and not isinstance(value, bool)
    if single and "a list (each" in what and "each a mapping" not in what:
        members = re.split(r"[,\s]+", value.strip()) if isinstance(value, str) else [shown(value)]
        change = f"write [{', '.join(members)}] if that is meant"
    return f"{change}, or remove the line for the default `{default}`" if default else change


def _unknown_key(key: str, name: str, where: Callable[[str], str], *, advised: bool) -> Fault:
    parent = key.removesuffix(name).removesuffix(".")  # the name may have dots of its own
    allowed = allowed_keys(parent) or ()
    what = f"must be one of {', '.join(allowed)}"
    advice = _advice(name, allowed) if advised else "remove the line"
    return Fault("CONFIG_UNKNOWN_KEY", where(key), what, f"`{name}`", advice)


def _advice(name: str, allowed: tuple[str, ...]) -> str:
    """Return the nearest key here, a key of that name elsewhere, or what became of a vLLM flag."""
    near = difflib.get_close_matches(name.lower(), allowed, n=1)
    if near:
        return f"write `{near[0]}` if that is meant, else remove the line"
    by_name = {entry.key.rpartition(".")[2]: entry.key for entry in every_entry()}
    far = difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=0.8)
    flag = flag_name(name.lower())
    if far:
        return f"write it as {by_name[far[0]]}"
    if name.lower() in ELSEWHERE:
        return f"remove the line and use {ELSEWHERE[name.lower()]}"
    if flag in OWNED:
        return f"remove the line; it is decided by {OWNED[flag]}"
    if flag in GONE:
        return f"remove the line: {GONE[flag]}"
    return "remove the line"
