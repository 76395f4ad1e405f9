"""A machine that is not there: the facts behind `--assume 2x16GiB`, to plan without a GPU."""

from __future__ import annotations

import re

from healthchecks.facts import GpuFacts, HostFacts, PairFacts

MIB = 1024**2

CARD_BYTES = {16: 16160 * MIB, 32: 32510 * MIB}
"""What NVML reports as total of a V100 sold as 16 or 32 GB, ECC on (the driver keeps the rest)."""

MOST_GPUS = 8
SPELLING = f"COUNTxSIZE with COUNT 1 to {MOST_GPUS} and SIZE 16GiB or 32GiB, then -nvlink or -p2p"

_SPEC = re.compile(rf"([1-{MOST_GPUS}])x(16|32)GiB(-nvlink|-p2p)?", re.ASCII)


def assumed_host(spec: str) -> HostFacts:
    """Return the facts of idle V100s such as `1x32GiB`, `2x16GiB` or `2x32GiB-nvlink`.

    Without a suffix nothing is known of the way between the cards; `-nvlink` says that every pair
    has two NVLink lanes, `-p2p` that every pair reaches the other over PCIe.

    Raises:
        ValueError: If the text is spelled otherwise; the message says how it must be spelled.
    """
    match = _SPEC.fullmatch(spec.strip())
    if match is None:
        raise ValueError(SPELLING)
    count, size, way = int(match[1]), int(match[2]), match[3]
    gpus = tuple(_card(index, CARD_BYTES[size]) for index in range(count))
    pairs = tuple(_pair(a, b, way) for a in range(count) for b in range(a + 1, count))
    return HostFacts(gpus=gpus, pairs=pairs)


def _card(index: int, total: int) -> GpuFacts:
    return GpuFacts(
        index=index,
        uuid=f"GPU-assumed-{index}",
        bus_id=f"00000000:{index + 1:02X}:00.0",
        name="Tesla V100 (assumed)",
        compute_capability=(7, 0),
        memory_total_bytes=total,
        memory_free_bytes=total,
        read_status={"all": "assumed"},
    )


def _pair(a: int, b: int, way: str | None) -> PairFacts:
    if way == "-nvlink":
        return PairFacts(a=a, b=b, nvlink_lanes=2)
    if way == "-p2p":
        status = "OK"
        return PairFacts(
            a=a,
            b=b,
            nvlink_lanes=0,
            read_ab=status,
            read_ba=status,
            write_ab=status,
            write_ba=status,
        )
    return PairFacts(a=a, b=b)
