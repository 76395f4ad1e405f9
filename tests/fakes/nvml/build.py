"""Builds the fake NVML library, whole or with the symbols of an older driver only."""

from __future__ import annotations

import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent

# Exported by newer drivers only; the genuine 535.261.03 and 470.256.02 libraries lack them.
NOT_IN_535 = ("nvmlDeviceGetDriverModel_v2", "nvmlDeviceGetRepairStatus")
NOT_IN_470 = (
    *NOT_IN_535,
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGpuMaxPcieLinkGeneration",
    "nvmlDeviceGetDefaultEccMode",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetSupportedClocksEventReasons",
    "nvmlDeviceGetSramEccErrorStatus",
    "nvmlDeviceGetGspFirmwareMode",
)
MISSING = {"newest": (), "535": NOT_IN_535, "470": NOT_IN_470}


def build_nvml(out: Path, driver: str = "newest") -> Path:
    """Compile `libnvidia-ml.so.1` into `out`, the folder that goes first in LD_LIBRARY_PATH."""
    out.mkdir(parents=True, exist_ok=True)
    script = out / "symbols.map"
    hidden = "".join(f"{name}; " for name in MISSING[driver])
    script.write_text(f"{{ global: nvml*; local: {hidden}*; }};\n")
    _compile(HERE / "nvml.c", out / "libnvidia-ml.so.1", f"-Wl,--version-script={script}")
    return out


def build_cuda(out: Path) -> Path:
    """Compile `libcuda.so.1` into `out`; returns that folder."""
    out.mkdir(parents=True, exist_ok=True)
    _compile(HERE / "cuda.c", out / "libcuda.so.1")
    return out


def _compile(source: Path, target: Path, *flags: str) -> None:
    command = ["gcc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    name = f"-Wl,-soname,{target.name}"
    subprocess.run([*command, name, *flags, "-o", target, source, "-lpthread"], check=True)
