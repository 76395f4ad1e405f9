"""Replays a recorded machine state: a published sample, or what `gate --record` wrote."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from healthchecks.codec import check_whole, from_plain, to_plain
from healthchecks.facts import GpuFacts, HostFacts, PairFacts
from healthchecks.plan import GatePlan, Kind
from healthchecks.sample import SCHEMA as SAMPLE_SCHEMA
from healthchecks.sample import SampleError, facts_of_sample
from healthchecks.sample_shape import REASONS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from healthchecks.policy import Policy

RECORD_SCHEMA = "appliance-machine-state/1"
NOT_SHOWN_UUID = "GPU-not-shown"
"""Stands for the second GPU of a plan when the record shows one only."""

MAX_RECORD_BYTES = 16 * 1024**2

_NAMING = (
    (re.compile(r"(?i)\b(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "GPU-hidden"),
    (re.compile(r"(?i)\b([0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b"), "bus-hidden"),
    (re.compile(r"(?i)\bpid[ =:]*\d+"), "pid hidden"),
)
"""What names a card, a place on the bus or a process in an error's text."""

MAX_NUMBER = 2**64
"""Above every counter of the driver; larger numbers of a record come from no machine."""

_OUTCOMES = re.compile("ok|mismatch|hang|crash|error|no_access")
WORDS = {
    "compute_mode": re.compile("default|exclusive_thread|prohibited|exclusive_process"),
    "functional": _OUTCOMES,
    "collective": _OUTCOMES,
    "collective_no_p2p": _OUTCOMES,
    "topology": re.compile(r"INTERNAL|PIX|PXB|PHB|NODE|SYS|(NV)?\d+"),
    "log": re.compile("read|unavailable|not_asked"),
    "reasons": re.compile("|".join(sorted(REASONS))),
}
"""Facts whose faults are known by one spelling, and every word they may have."""

MAY_BE_NEGATIVE = frozenset({"numa_node", "gpu_c", "hbm_c"})
"""Facts that are no counts: the kernel says -1 for no NUMA node, and it may freeze."""


@dataclass(frozen=True)
class _Recorded:
    """What `record_text` writes."""

    schema: str
    plan_gpus: tuple[str, ...]
    facts: HostFacts


def load_state(path: Path) -> tuple[HostFacts, tuple[str, ...], bool]:
    """Return facts, the UUIDs the state is about, and whether it is a published sample.

    Raises:
        SampleError: If the file is unreadable, too large, no JSON, or of another schema.
    """
    try:
        read = read_json(_text_of(path))
    except OSError as error:
        raise SampleError((error.strerror or str(error)).lower()) from error
    except UnicodeDecodeError as error:
        raise SampleError("bytes that are no UTF-8 text") from error
    except ValueError as error:
        raise SampleError(f"no JSON: {error}") from error
    if not isinstance(read, dict):
        raise SampleError("JSON that is no object: a JSON object is needed")
    record = cast("Mapping[str, Any]", read)
    schema = record.get("schema")
    if schema == SAMPLE_SCHEMA:
        facts, gpus = facts_of_sample(record)
        return _checked(to_plain(facts), gpus), gpus, True
    if schema != RECORD_SCHEMA:
        raise SampleError(
            f"schema {json.dumps(schema)}; {SAMPLE_SCHEMA} or {RECORD_SCHEMA} is needed"
        )
    try:
        check_whole(_Recorded, record)
        recorded = from_plain(_Recorded, record)
    except TypeError as error:
        raise SampleError(f"not a whole record: {error}") from error
    return _checked(to_plain(recorded.facts), recorded.plan_gpus), recorded.plan_gpus, False


def _text_of(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_RECORD_BYTES + 1)  # a device has no size and no end
    if len(content) > MAX_RECORD_BYTES:
        raise OSError(f"larger than {MAX_RECORD_BYTES} bytes")
    return content.decode("utf-8")


def read_json(text: str) -> object:
    """Parse JSON strictly: no NaN, no infinity, no name twice, no nesting too deep to follow.

    Raises:
        ValueError: If the text is no such JSON.
    """
    try:
        return json.loads(
            text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_once
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _once(members: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(members)
    if len(found) != len(members):
        names = [name for name, _ in members]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is there twice in one object")
    return found


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _checked(plain: Mapping[str, Any], gpus: tuple[str, ...]) -> HostFacts:
    """Return the facts when every value has its type and a size that a machine can have.

    Raises:
        SampleError: If one has not, or a GPU or a pair is there twice.
    """
    try:
        facts = from_plain(HostFacts, plain)
        _no_odd_number(to_plain(facts), "facts")
        _no_odd_word(to_plain(facts), "facts")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SampleError(f"not a whole record: {error}") from error
    indexes = [gpu.index for gpu in facts.gpus]
    if len(set(gpus)) != len(gpus) or len(set(indexes)) != len(indexes):
        raise SampleError("a record in which a GPU is listed twice")
    pairs = [frozenset((pair.a, pair.b)) for pair in facts.pairs]
    if len(set(pairs)) != len(pairs) or any(len(pair) == 1 for pair in pairs):
        raise SampleError("a record in which a pair is listed twice, or is one GPU with itself")
    return facts


def _no_odd_word(value: object, where: str) -> None:
    """Refuse a word of a closed list in another spelling: no check would know it as a fault."""
    if isinstance(value, dict):
        for key, member in cast("Mapping[str, object]", value).items():
            if key != "read_status":  # whose keys are names of facts, its words are of reads
                _no_odd_word(member, key)
    elif isinstance(value, list):
        for member in cast("list[object]", value):
            _no_odd_word(member, where)
    elif isinstance(value, str) and where in WORDS and not WORDS[where].fullmatch(value):
        raise ValueError(f"{where} is {json.dumps(value)}, a word that no machine gives")


def _no_odd_number(value: object, where: str) -> None:
    if isinstance(value, dict):
        for key, member in cast("Mapping[str, object]", value).items():
            _no_odd_number(member, key)
    elif isinstance(value, list):
        for member in cast("list[object]", value):
            _no_odd_number(member, where)
    elif isinstance(value, int | float):
        least = -MAX_NUMBER if where in MAY_BE_NEGATIVE else 0
        if not least <= value <= MAX_NUMBER:
            raise ValueError(f"{where}: {value:.6g} cannot be")


def plan_as(kind: Kind, uuids: tuple[str, ...], policy: Policy) -> GatePlan:
    """Return a plan of one kind for a recorded machine: its first GPU, or its first two."""
    wanted = 1 if kind == "single" else 2
    padded = (*uuids, *(NOT_SHOWN_UUID for _ in range(wanted - len(uuids))))
    return GatePlan(kind=kind, uuids=padded[:wanted], policy=policy)


def record_text(facts: HostFacts, plan: GatePlan) -> str:
    """Return the state as JSON without serials, UUIDs, bus ids, pids or host variables."""
    names = {gpu.uuid: f"GPU-{gpu.index}" for gpu in facts.gpus}
    buses = {gpu.bus_id: f"bus-{gpu.index}" for gpu in facts.gpus if gpu.bus_id}
    plain = {
        "schema": RECORD_SCHEMA,
        "plan_gpus": [names.get(uuid, NOT_SHOWN_UUID) for uuid in plan.uuids],
        "facts": to_plain(
            replace(
                facts,
                gpus=tuple(_nameless(gpu, names, buses) for gpu in facts.gpus),
                pairs=tuple(_plain_pair(pair) for pair in facts.pairs),
                boot_id=None,
                environment={},
                holders={},
                host_action=facts.host_action and "reboot",
                wedged_pids=tuple(0 for _ in facts.wedged_pids),
                shadowing_libcuda=facts.shadowing_libcuda and "hidden",
            )
        ),
    }
    serials = {gpu.serial: "hidden" for gpu in facts.gpus}
    pairs = (*names.items(), *buses.items(), *serials.items())
    known = {name: word for name, word in pairs if name}
    return json.dumps(_scrubbed(plain, known), indent=1) + "\n"


def _scrubbed(value: object, known: Mapping[str, str]) -> object:
    """Return a plain value whose texts name no card, no place on the bus and no process."""
    if isinstance(value, dict):
        members = cast("Mapping[str, object]", value)
        return {key: _scrubbed(member, known) for key, member in members.items()}
    if isinstance(value, list):
        return [_scrubbed(member, known) for member in cast("list[object]", value)]
    if not isinstance(value, str):
        return value
    for name, word in known.items():
        value = value.replace(name, word)
    for pattern, word in _NAMING:
        value = pattern.sub(word, value)
    return value


def _nameless(gpu: GpuFacts, names: Mapping[str | None, str], buses: Mapping[str, str]) -> GpuFacts:
    lanes = gpu.links and tuple(
        replace(lane, remote_bus_id=lane.remote_bus_id and buses.get(lane.remote_bus_id, "other"))
        for lane in gpu.links
    )
    return replace(
        gpu,
        uuid=names[gpu.uuid],
        bus_id=gpu.bus_id and buses[gpu.bus_id],
        serial=None,
        process_pids=gpu.process_pids and tuple(0 for _ in gpu.process_pids),
        links=lanes,
    )


def _plain_pair(pair: PairFacts) -> PairFacts:
    return replace(pair, functional_detail=pair.functional_detail[:200])
