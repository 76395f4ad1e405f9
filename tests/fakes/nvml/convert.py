"""Turns a recorded machine state (`v100-health-sample/1`) into a scenario of the fake NVML library.

It reads the record by itself, not through the product's reader, so that the two check each other.
"""

from __future__ import annotations

from typing import Any

MIB = 1024**2
LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50, "SOC": 50}
STATUSES = {
    "OK": 0,
    "CHIPSET_NOT_SUPPORTED": 1,
    "CNS": 1,
    "GPU_NOT_SUPPORTED": 2,
    "GNS": 2,
    "TOPOLOGY_NOT_SUPPORTED": 3,
    "TNS": 3,
    "DISABLED_BY_REGKEY": 4,
    "DR": 4,
    "NOT_SUPPORTED": 5,
    "NS": 5,
}
REASONS = {
    "gpu_idle": 1,
    "sw_power_cap": 4,
    "hw_slowdown": 8,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake": 0x80,
}


def bus_id(index: int) -> str:
    """Return the bus id that the scenario gives a GPU."""
    return f"00000000:{0x10 + index:02X}:00.0"


def scenario_of(record: dict[str, Any], *, fill_healthy: bool) -> dict[str, Any]:
    """Return the scenario; with `fill_healthy` unshown values are those of a healthy card.

    Without it, the evidence a start needs (errors, pending pages, link, peers) stays unreadable,
    and only what
    a record can never show is filled in.
    """
    host = record["host"]
    scenario: dict[str, Any] = {
        "driver_version": host["driver"] or ("580.95.05" if fill_healthy else None),
        "nvml_version": "13.580.95.05",
        "gpus": [_gpu(item, fill_healthy=fill_healthy) for item in _filled(record)],
        "pairs": [_pair(item) for item in record["pairs"]],
        "faults": [fault for item in record["gpus"] for fault in _faults(item)],
    }
    if host["driver_loaded"] is False:
        scenario["init"] = {"error": 9}
    if any("block" in text for text in record["behaviour"] if "NVML" in text):
        scenario["faults"].append({"call": "nvmlDeviceGetHandleByIndex_v2", "hang_ms": -1})
    return scenario


def _filled(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one entry an index; a record may list some GPUs of a machine only."""
    known = {item["index"]: item for item in record["gpus"]}
    return [known.get(index, {"index": index, "absent": True}) for index in range(max(known) + 1)]


def _gpu(item: dict[str, Any], *, fill_healthy: bool) -> dict[str, Any]:
    index = item["index"]
    base = {
        "uuid": f"GPU-{index}",
        "bus_id": bus_id(index),
        "inforom_valid": 1,
        "processes": [],
        "compute_mode": 0,
    }
    if item.get("absent"):
        return base
    healthy = _healthy() if fill_healthy else _never_shown()
    shown = {
        "name": item["product"],
        "compute_capability": item["compute_capability"] and float(item["compute_capability"]),
        "memory": _memory(item),
        "ecc": _ecc(item),
        "retired": _retired(item["retired"]),
        "pcie": {
            "width": item["pcie"]["width_current"],
            "width_max": item["pcie"]["width_max"],
            "generation": item["pcie"]["gen_current"],
            "generation_max": item["pcie"]["gen_max"],
            "replays": item["pcie"]["replays"],
        },
        "thermal": {
            key: item["temp_c"][key]
            for key in ("gpu", "hbm", "slowdown", "shutdown", "gpu_max", "hbm_max")
        },
        "power": {key: item["power_w"][key] for key in ("draw", "limit", "default", "min")},
        "reasons": None
        if item["clock_reasons_active"] is None
        else _bits(item["clock_reasons_active"]),
        "utilization": item["util_gpu_pct"],
        "persistence": _flag(item["persistence"]),
        "links": None
        if item["nvlink"] is None
        else [{"active": int(lane["active"])} for lane in item["nvlink"]],
    }
    if "V100" in (item["product"] or "").upper():
        healthy["compute_capability"] = 7.0
    return {**base, **_over(healthy, shown)}


def _over(base: dict[str, Any], shown: dict[str, Any]) -> dict[str, Any]:
    """Lay what is shown over the base, section by section; a None shows nothing."""
    merged = dict(base)
    for key, value in shown.items():
        if isinstance(value, dict):
            merged[key] = _over(base.get(key) or {}, value)
        elif value is not None:
            merged[key] = value
    return merged


def _never_shown() -> dict[str, Any]:
    return {
        "memory": {"total": 32768 * MIB},
        "ecc": {"mode_current": 1, "mode_pending": 1, "aggregate_sbe": 0, "aggregate_dbe": 0},
        "retired": {"sbe": 0, "dbe": 0},
        "thermal": {"gpu": 40, "hbm": 40, "hbm_max": 85},
        "reasons": 0,
        "power": {"draw": 40.0, "limit": 250.0},
        "persistence": 1,
    }


def _healthy() -> dict[str, Any]:
    base = _never_shown()
    base["ecc"].update(volatile_sbe=0, volatile_dbe=0)
    base["retired"].update(pending=0)
    base["pcie"] = {
        "width": 16,
        "width_max": 16,
        "generation": 3,
        "generation_max": 3,
        "replays": 0,
    }
    base["compute_capability"] = 7.0
    return base


def _memory(item: dict[str, Any]) -> dict[str, Any]:
    total, used = item["memory_total_mib"], item["memory_used_mib"]
    return {"total": total and total * MIB, "used": (used or 0) * MIB}


def _ecc(item: dict[str, Any]) -> dict[str, Any]:
    ecc = item["ecc"]
    volatile = ecc["volatile_dbe"]
    if volatile is None and "non-zero" in item["read_errors"].get("volatile_dbe", ""):
        volatile = 1
    return {
        "mode_current": _flag(ecc["mode_current"]),
        "mode_pending": _flag(ecc["mode_pending"]),
        "volatile_sbe": ecc["volatile_sbe"],
        "volatile_dbe": volatile,
        "aggregate_sbe": ecc["aggregate_sbe"],
        "aggregate_dbe": ecc["aggregate_dbe"],
    }


def _retired(item: dict[str, Any]) -> dict[str, Any]:
    return {"sbe": item["sbe"], "dbe": item["dbe"], "pending": _flag(item["pending"])}


def _flag(word: str | None) -> int | None:
    return None if word is None else int(word in ("Enabled", "Yes"))


def _bits(names: list[str]) -> int:
    return sum(REASONS[name] for name in names)


def _faults(item: dict[str, Any]) -> list[dict[str, Any]]:
    if not any(key.startswith("power") for key in item["read_errors"]):
        return []
    return [{"call": "nvmlDeviceGetPowerUsage", "gpu": item["index"], "return": 999}]


def _pair(item: dict[str, Any]) -> dict[str, Any]:
    pair = {"a": item["a"], "b": item["b"], "topology": LEVELS.get(item["topology"])}
    for kind in ("read", "write"):
        value = item[f"p2p_{kind}"]
        ways = list(value.values()) if isinstance(value, dict) else [value, value]
        pair[f"{kind}_ab"], pair[f"{kind}_ba"] = (STATUSES.get(way) for way in (ways[0], ways[-1]))
    return pair
