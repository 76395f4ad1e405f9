"""Reads a published machine state (`v100-health-sample/1`); what it does not show stays None.

A record's free text is read for a handful of plain statements only (see `_behaviour`); its verdicts
and its
prose are never looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from healthchecks.facts import (
    NOT_SHOWN,
    EccFacts,
    GpuFacts,
    HostFacts,
    KernelFacts,
    LinkFacts,
    PairFacts,
    PcieFacts,
    PowerFacts,
    RetiredFacts,
    ThermalFacts,
    XidFacts,
)
from healthchecks.sample_shape import FACT_OF, check_shape, reason_name

SCHEMA = "v100-health-sample/1"
_MIB = 1024**2
_LOST = re.compile(r"lost|fallen|off the bus|reset required|device handle", re.IGNORECASE)
_NON_ZERO = re.compile(r"non-?zero|uncorrectable|[1-9]\d*", re.IGNORECASE)
_SUPPORTED = frozenset({"OK", "SUPPORTED", "YES"})
_UNTESTED = re.compile(r"not (run|tested|tried|shown)|unknown|\bn/?a\b", re.IGNORECASE)
_WEDGED = re.compile(r"(nvml|nvidia-smi).*(block|hang|never (return|answer))", re.IGNORECASE)
_REFUSED = re.compile(
    r"(allocation|context)\b.*\b(fail|refuse|error)|(fail|refuse|error).*\b(allocation|context)",
    re.IGNORECASE,
)
_LOADED_GENERATION = re.compile(r"loaded_gen\s*=\s*(\d)")
_LOADED_WIDTH = re.compile(r"loaded_width\s*=\s*x?(\d+)")
_REPLAYS = re.compile(r"replays?\s*\+\s*(\d+)\s*in\s*(\d+)\s*(s|min)")
_NUMA = re.compile(r"numa|socket", re.IGNORECASE)
_AWAY = re.compile(r"remote|different|other|cross|wrong|not local|far", re.IGNORECASE)


_PLACES = {
    "power.draw": "power_w.draw",
    "pending": "retired.pending",
    **{fact[4:]: fact for key, fact in FACT_OF.items() if key == fact and fact.startswith("ecc.")},
}
"""Short names of `read_errors` to where the record has the value."""


class SampleError(ValueError):
    """The file is no machine state of this kind."""


Record = Mapping[str, Any]


def facts_of_sample(record: Record) -> tuple[HostFacts, tuple[str, ...]]:
    """Return the facts of a record and the UUIDs of the GPUs it is about, first one first.

    UUIDs are made up of the indexes (`GPU-0`): records carry none.

    Raises:
        SampleError: If it has another schema, lacks a part, or holds one that cannot be read.
    """
    if record.get("schema") != SCHEMA:
        raise SampleError(f"schema {SCHEMA} is needed, got {record.get('schema')!r}")
    try:
        check_shape(record)
        return _host(record), tuple(f"GPU-{index}" for index in record["plan_gpus"])
    except (ValueError, ArithmeticError) as error:
        raise SampleError(f"not a whole record: {error}") from error


def _host(record: Record) -> HostFacts:
    host, said = (
        cast("Record", record["host"]),
        [str(text) for text in record.get("behaviour") or ()],
    )
    presumed = (7, 0) if record.get("verdict_presumes") else None  # judged as if it were a Volta
    gpus = tuple(_gpu(item, presumed) for item in record["gpus"])
    pairs = tuple(_pair(item) for item in record.get("pairs") or ())
    facts = HostFacts(
        gpus=gpus,
        pairs=pairs,
        driver_version=host.get("driver"),
        nvml="ok" if host.get("driver_loaded") is not False else "driver_not_loaded",
        gpus_expected=host.get("gpus_expected"),
        gpus_visible=host.get("gpus_visible"),
        wedged_pids=(0,) if any(_WEDGED.search(text) for text in said) else (),
        kernel=_kernel(record.get("kernel") or {}),
    )
    for text in said:
        facts = _behaviour(facts, text)
    return facts


def _gpu(item: Record, presumed: tuple[int, int] | None) -> GpuFacts:
    shown = cast("Mapping[str, object]", item.get("read_errors") or {})
    errors = {key: str(value) for key, value in shown.items()}
    item = _without_unread(item, errors)
    capability = item.get("compute_capability") or _capability(item.get("product"))
    total, used = item.get("memory_total_mib"), item.get("memory_used_mib")
    lanes = item.get("nvlink")
    gpu = GpuFacts(
        index=int(item["index"]),
        uuid=f"GPU-{int(item['index'])}",
        name=item.get("product"),
        compute_capability=presumed or (capability and _two_numbers(str(capability))) or None,
        memory_total_bytes=None if total is None else int(total) * _MIB,
        memory_free_bytes=None if total is None else (int(total) - int(used or 0)) * _MIB,
        persistence=_flag(item.get("persistence")),
        utilization_percent=item.get("util_gpu_pct"),
        ecc=_ecc(item.get("ecc") or {}, errors),
        retired=_retired(item.get("retired") or {}),
        pcie=_pcie(item.get("pcie") or {}),
        thermal=_thermal(item),
        power=_power(item.get("power_w") or {}, errors),
        links=None if lanes is None else tuple(_lane(lane) for lane in lanes),
    )
    return replace(gpu, read_status={"*": NOT_SHOWN, **_statuses(errors)})


def _without_unread(item: Record, errors: Mapping[str, str]) -> Record:
    """Return a GPU without the values that a tool could not read: the error is the newer word."""
    kept = {
        key: dict(cast("Record", value)) if isinstance(value, Mapping) else value
        for key, value in item.items()
    }
    for key in errors:
        section, _, name = _PLACES.get(key, key).rpartition(".")
        part = kept.get(section) if section else kept
        if isinstance(part, dict):
            cast("dict[str, object]", part).pop(name, None)
    return kept


def _capability(product: str | None) -> str | None:
    """A product called V100 is a Volta; other names prove nothing."""
    return "7.0" if product is not None and "V100" in product.upper() else None


def _two_numbers(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def _flag(word: str | bool | None) -> bool | None:
    return None if word is None else str(word).lower() in ("enabled", "yes", "on", "true")


def _ecc(item: Record, errors: Mapping[str, str]) -> EccFacts:
    volatile = item.get("volatile_dbe")
    if volatile is None and _NON_ZERO.search(errors.get("volatile_dbe", "")):
        volatile = 1  # the tool showed a count above zero without saying which
    return EccFacts(
        mode_current=_flag(item.get("mode_current")),
        mode_pending=_flag(item.get("mode_pending")),
        volatile_sbe=item.get("volatile_sbe"),
        volatile_dbe=volatile,
        aggregate_sbe=item.get("aggregate_sbe"),
        aggregate_dbe=item.get("aggregate_dbe"),
    )


def _retired(item: Record) -> RetiredFacts:
    return RetiredFacts(item.get("sbe"), item.get("dbe"), _flag(item.get("pending")))


def _pcie(item: Record) -> PcieFacts:
    return PcieFacts(
        width=item.get("width_current"),
        width_max=item.get("width_max"),
        generation=item.get("gen_current"),
        generation_max=item.get("gen_max"),
        replays=item.get("replays"),
    )


def _thermal(item: Record) -> ThermalFacts:
    temps, reasons = cast("Record", item.get("temp_c") or {}), item.get("clock_reasons_active")
    return ThermalFacts(
        gpu_c=temps.get("gpu"),
        hbm_c=temps.get("hbm"),
        slowdown_c=temps.get("slowdown"),
        shutdown_c=temps.get("shutdown"),
        gpu_max_c=temps.get("gpu_max"),
        hbm_max_c=temps.get("hbm_max"),
        reasons=None if reasons is None else tuple(reason_name(str(reason)) for reason in reasons),
    )


def _power(item: Record, errors: Mapping[str, str]) -> PowerFacts:
    return PowerFacts(
        draw_w=item.get("draw"),
        limit_w=item.get("limit"),
        default_w=item.get("default"),
        min_w=item.get("min"),
        failed_reads=3 if any(FACT_OF[key] == "power.draw_w" for key in errors) else 0,
    )


def _lane(item: Record) -> LinkFacts:
    return LinkFacts(link=int(item["link"]), active=bool(item["active"]))


def _statuses(errors: Mapping[str, str]) -> dict[str, str]:
    """Name what a tool printed in place of a value, in the words of live reads."""
    found: dict[str, str] = {}
    for key, text in errors.items():
        found[FACT_OF[key]] = "gpu_is_lost" if _LOST.search(text) else f"error: {text}"
    return found


def _pair(item: Record) -> PairFacts:
    a, b = int(item["a"]), int(item["b"])
    topology = item.get("topology")
    read, write = _ways(item.get("p2p_read"), a, b), _ways(item.get("p2p_write"), a, b)
    text = item.get("functional_copy")
    return PairFacts(
        a=a,
        b=b,
        nvlink_lanes=item.get("nvlink_lanes"),
        topology="SYS" if topology == "SOC" else topology,
        read_ab=read[0],
        read_ba=read[1],
        write_ab=write[0],
        write_ba=write[1],
        functional=_outcome(text),
        functional_detail=str(text or ""),
        custom_all_reduce_only="all-reduce" in str(text or "").lower(),
        read_status={"*": NOT_SHOWN},
    )


def _ways(value: object, a: int, b: int) -> tuple[str | None, str | None]:
    """Return the status from a to b and from b to a; a map names each way, in whatever spelling."""
    if value is None:
        return None, None
    if not isinstance(value, Mapping):
        return _peer(value), _peer(value)
    ways = list(cast("Mapping[str, object]", value).items())
    forward = next((item for key, item in ways if _names_way(key, a, b)), None)
    backward = next((item for key, item in ways if _names_way(key, b, a)), None)
    if forward is None and backward is None and ways:
        forward, backward = ways[0][1], ways[-1][1]
    return _peer(forward), _peer(backward)


def _names_way(key: str, source: int, target: int) -> bool:
    letters = {
        "a_to_b": source < target,
        "b_to_a": source > target,
        "ab": source < target,
        "ba": source > target,
    }
    if key.lower() in letters:
        return letters[key.lower()]
    return [int(number) for number in re.findall(r"\d+", key)] == [source, target]


def _peer(value: object) -> str | None:
    if value is None:
        return None
    text = str(value).upper()
    return "OK" if text in _SUPPORTED else text


def _outcome(text: str | None) -> str | None:
    """Sort what a copy did into the words of the functional test."""
    if text is None or _UNTESTED.search(text):
        return None
    low = text.lower()
    if re.match(r"ok\b|pass", low) and "disab" not in low:
        return "ok"
    if re.search(r"hang|hung|time|never|block|spin|stuck", low):
        return "hang"
    if re.search(r"seg|crash|signal|abort|core", low):
        return "crash"
    return "mismatch"


def _kernel(item: Record) -> KernelFacts:
    xids = tuple(
        XidFacts(xid=int(event["xid"]), gpu=event.get("gpu"), count=int(event.get("count") or 1))
        for event in item.get("xids") or ()
    )
    lines = cast("Sequence[Record]", item.get("pcie_aer") or ())
    fatal = [
        line for line in lines if not str(line.get("severity", "")).lower().startswith("corrected")
    ]
    mild = [line for line in lines if line not in fatal]
    return KernelFacts(
        log="read" if xids or lines else "not_asked",
        xids=xids,
        aer_fatal=tuple(str(line.get("kind")) for line in fatal),
        aer_corrected=tuple(str(line.get("kind")) for line in mild),
    )


def _behaviour(facts: HostFacts, text: str) -> HostFacts:
    """Take one plain statement of the record into the facts; other prose is left alone."""
    named = re.search(r"GPU (\d+)", text)
    only = None if named is None else int(named[1])
    if found := _LOADED_GENERATION.search(text):
        return _with_pcie(facts, only, loaded_generation=int(found[1]))
    if found := _LOADED_WIDTH.search(text):
        return _with_pcie(facts, only, loaded_width=int(found[1]))
    if found := _REPLAYS.search(text):
        minutes = int(found[2]) / (60 if found[3] == "s" else 1)
        return _with_pcie(facts, only, replays_per_min=int(found[1]) / minutes)
    if _REFUSED.search(text) and only is not None and not text.lower().startswith("no "):
        return _with_gpu(facts, only, alloc=text)
    if _NUMA.search(text) and _AWAY.search(text):
        return replace(_with_gpu(facts, only, numa_node=1), numa_node=0)
    return facts


def _with_gpu(facts: HostFacts, only: int | None, **changes: object) -> HostFacts:
    gpus = tuple(
        replace(gpu, **cast("Any", changes)) if only in (None, gpu.index) else gpu
        for gpu in facts.gpus
    )
    return replace(facts, gpus=gpus)


def _with_pcie(facts: HostFacts, only: int | None, **changes: object) -> HostFacts:
    gpus = tuple(
        replace(gpu, pcie=replace(gpu.pcie, **cast("Any", changes)))
        if only in (None, gpu.index)
        else gpu
        for gpu in facts.gpus
    )
    return replace(facts, gpus=gpus)
