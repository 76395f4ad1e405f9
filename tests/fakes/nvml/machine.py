"""The scenario of a machine with nothing wrong, to be changed by the test."""

from __future__ import annotations

import json
from typing import Any

GIB = 1024**3


def healthy(count: int = 2) -> dict[str, Any]:
    """Return the scenario of a host with healthy V100 PCIe 32 GB."""
    gpu = {
        "name": "Tesla V100-PCIE-32GB",
        "compute_capability": 7.0,
        "memory": {"total": 32 * GIB, "used": 0},
        "processes": [],
        "inforom_valid": 1,
        "persistence": 1,
        "compute_mode": 0,
        "utilization": 0,
        "ecc": {
            "mode_current": 1,
            "mode_pending": 1,
            "volatile_sbe": 0,
            "volatile_dbe": 0,
            "aggregate_sbe": 0,
            "aggregate_dbe": 0,
            "volatile_dbe_at": {"l1": 0, "l2": 0, "device": 0, "register": 0, "cbu": 0},
        },
        "retired": {"sbe": 0, "dbe": 0, "pending": 0, "pending_sbe": 0, "pending_dbe": 0},
        "pcie": {"width": 16, "width_max": 16, "generation": 3, "generation_max": 3, "replays": 0},
        "thermal": {
            "gpu": 40,
            "hbm": 38,
            "slowdown": 87,
            "shutdown": 90,
            "gpu_max": 83,
            "hbm_max": 85,
        },
        "power": {"draw": 35.0, "limit": 250.0, "default": 250.0, "min": 100.0},
        "reasons": 1,
    }
    buses = [f"00000000:{0x10 + index:02X}:00.0" for index in range(count)]
    gpus = [
        {**gpu, "uuid": f"GPU-{i}", "bus_id": bus, "serial": f"032{i}"}
        for i, bus in enumerate(buses)
    ]
    ways = dict.fromkeys(("read_ab", "read_ba", "write_ab", "write_ba"), 0)
    return {
        "driver_version": "580.95.05",
        "nvml_version": "13.580.95.05",
        "cuda_version": 13000,
        "gpus": json.loads(json.dumps(gpus)),
        "pairs": [{"a": 0, "b": 1, "topology": 30, **ways}] if count > 1 else [],
        "faults": [],
    }
