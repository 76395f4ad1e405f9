"""Compares the gate with a real machine: `python3 tests/gpu/run_gate.py`, from the repository root.

Needs NVIDIA GPUs, nvidia-smi, and the module pynvml (package nvidia-ml-py) on the path; PyTorch
with CUDA for the all-reduce, gcc or a prebuilt `build/gpu/liar/libcuda.so.1` for the lie. Writes
`gate.json` and `machine.json` into $OUT (default: the current folder); exit 0 when everything it
could compare agrees.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from healthchecks.codec import to_plain  # noqa: E402 - the checkout is not installed
from healthchecks.facts import GpuFacts, HostFacts  # noqa: E402
from healthchecks.nvml import read_host  # noqa: E402
from healthchecks.plan import GatePlan  # noqa: E402
from healthchecks.policy import policy_of  # noqa: E402
from healthchecks.probing import (  # noqa: E402
    has_torch,
    probe_collective,
    probe_gpu,
    probe_pair,
)
from healthchecks.runner import Options, run  # noqa: E402
from healthchecks.simulate import record_text  # noqa: E402

SIZE = 64 * 1024**2
TIMEOUT_S = 60.0

# nvidia-smi's name of a field, the fact, and how far two readings may lie apart (None: exact text).
FIELDS: list[tuple[str, str, float | None]] = [
    ("uuid", "uuid", None),
    ("name", "name", None),
    ("compute_cap", "compute_capability", None),
    ("memory.total", "memory_total_bytes", 1.0),
    ("persistence_mode", "persistence", None),
    ("compute_mode", "compute_mode", None),
    ("ecc.mode.current", "ecc.mode_current", None),
    ("ecc.mode.pending", "ecc.mode_pending", None),
    ("ecc.errors.corrected.volatile.total", "ecc.volatile_sbe", 0.0),
    ("ecc.errors.uncorrected.volatile.total", "ecc.volatile_dbe", 0.0),
    ("ecc.errors.corrected.aggregate.total", "ecc.aggregate_sbe", 0.0),
    ("ecc.errors.uncorrected.aggregate.total", "ecc.aggregate_dbe", 0.0),
    ("retired_pages.single_bit_ecc.count", "retired.sbe", 0.0),
    ("retired_pages.double_bit.count", "retired.dbe", 0.0),
    ("retired_pages.pending", "retired.pending", None),
    ("pcie.link.gen.max", "pcie.generation_max", 0.0),
    ("pcie.link.width.current", "pcie.width", 0.0),
    ("pcie.link.width.max", "pcie.width_max", 0.0),
    ("temperature.gpu", "thermal.gpu_c", 5.0),
    ("temperature.memory", "thermal.hbm_c", 5.0),
    ("power.draw", "power.draw_w", 60.0),
    ("power.limit", "power.limit_w", 0.5),
    ("power.default_limit", "power.default_w", 0.5),
    ("power.min_limit", "power.min_w", 0.5),
    ("clocks.mem", "mem_clock_mhz", 0.0),
]
_UNSHOWN = ("[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "")


def smi(*arguments: str) -> str:
    """Return what nvidia-smi prints."""
    done = subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout


def smi_rows() -> list[dict[str, str]]:
    """Return every field by GPU, leaving out fields that this nvidia-smi does not know."""
    known: list[dict[str, str]] = []
    for field, _, _ in FIELDS:
        text = smi(f"--query-gpu={field}", "--format=csv,noheader,nounits").strip()
        if "not a valid field" in text:
            continue
        for index, value in enumerate(text.splitlines()):
            if index >= len(known):
                known.append({})
            known[index][field] = value.strip()
    return known


def fact(gpu: GpuFacts, path: str) -> Any:
    value: Any = gpu
    for step in path.split("."):
        value = getattr(value, step)
    return value


def spelled(path: str, value: Any) -> str:
    """Return a fact as nvidia-smi would print it."""
    if path == "compute_capability":
        return "{}.{}".format(*value)
    if path == "compute_mode":
        return {"default": "Default", "prohibited": "Prohibited"}.get(value, "Exclusive_Process")
    if path == "retired.pending":
        return "Yes" if value else "No"
    if isinstance(value, bool):
        return "Enabled" if value else "Disabled"
    return str(value)


def compared(gpu: GpuFacts, row: dict[str, str]) -> list[dict[str, Any]]:
    """Return one line a field: both readings and whether they agree."""
    lines = []
    for field, path, slack in FIELDS:
        if field not in row:
            continue
        shown, read = row[field], fact(gpu, path)
        if shown in _UNSHOWN:
            agrees = read is None
        elif read is None:
            agrees = False
        elif slack is None:
            agrees = spelled(path, read).lower() == shown.lower()
        else:
            scaled = read / 1024**2 if path == "memory_total_bytes" else float(read)
            agrees = abs(scaled - float(shown)) <= slack
        status = gpu.read_status.get(path, "")
        lines.append(
            {"field": field, "smi": shown, "facts": read, "status": status, "agrees": agrees}
        )
    return lines


def peers_agree(host: HostFacts) -> list[dict[str, Any]]:
    """Compare peer access and path with `nvidia-smi topo`."""
    tables = {
        name: matrix(smi("topo", *words))
        for name, words in (("read", ("-p2p", "r")), ("write", ("-p2p", "w")), ("path", ("-m",)))
    }
    lines = []
    for pair in host.pairs:
        shown = {name: table.get((pair.a, pair.b), "") for name, table in tables.items()}
        ok = {"read": pair.read_ab == "OK", "write": pair.write_ab == "OK"}
        agrees = all((shown[name] == "OK") == ok[name] for name in ok if shown[name])
        if shown["path"] and not shown["path"].startswith("NV"):
            agrees = agrees and shown["path"] == pair.topology
        lines.append(
            {"pair": [pair.a, pair.b], "smi": shown, "facts": to_plain(pair), "agrees": agrees}
        )
    return lines


def matrix(text: str) -> dict[tuple[int, int], str]:
    """Return the cells of a matrix that nvidia-smi prints, by GPU indexes."""
    cells = {}
    for line in text.splitlines():
        words = line.replace("\x1b[4m", "").replace("\x1b[0m", "").split()
        if not words or not words[0].startswith("GPU") or not words[0][3:].isdigit():
            continue
        for column, word in enumerate(words[1:]):
            cells[(int(words[0][3:]), column)] = word
    return cells


def liar(folder: Path) -> Path | None:
    """Return the folder of the lying library: built here, else the prebuilt one, else None."""
    source, target = ROOT / "tests/gpu/lying_libcuda.c", folder / "libcuda.so.1"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler:
        flags = [
            "-shared",
            "-fPIC",
            "-O1",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            str(target),
            str(source),
            "-ldl",
        ]
        if subprocess.run([compiler, *flags], check=False).returncode == 0:
            return folder
    prebuilt = ROOT / "build/gpu/liar"
    return prebuilt if (prebuilt / "libcuda.so.1").is_file() else None


def real_libcuda() -> str:
    """Return the path of the driver's library as this process loads it."""
    ctypes.CDLL("libcuda.so.1")
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[-1] for line in lines if "libcuda.so" in line)


def pair_results(host: HostFacts) -> dict[str, Any]:
    """Run the functional test as it is, through an honest stub, and through a lying one."""
    first, second, pair = host.gpus[0], host.gpus[1], host.pairs[0]
    started = time.monotonic()
    plain, _ = probe_pair(pair, first, second, SIZE, TIMEOUT_S)
    found: dict[str, Any] = {
        "plain": to_plain(plain),
        "seconds": round(time.monotonic() - started, 2),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = liar(Path(name))
        if folder is None:
            return found | {"lie": "no compiler and no prebuilt library"}
        before = dict(os.environ)
        os.environ["REAL_LIBCUDA"] = real_libcuda()
        os.environ["LD_LIBRARY_PATH"] = f"{folder}:{before.get('LD_LIBRARY_PATH', '')}"
        for lie in ("none", "drop"):
            os.environ["LIE"] = lie
            result, _ = probe_pair(pair, first, second, SIZE, TIMEOUT_S)
            found[f"lie_{lie}"] = to_plain(result)
        os.environ.clear()
        os.environ.update(before)
    return found


def collective_results(host: HostFacts) -> dict[str, Any]:
    """Run the two-rank all-reduce with and without P2P."""
    if not has_torch():
        return {"skipped": "no torch"}
    uuids = (host.gpus[0].uuid or "", host.gpus[1].uuid or "")
    return {
        name: dict(
            zip(("outcome", "detail"), probe_collective(uuids, TIMEOUT_S, p2p=p2p), strict=True)
        )
        for name, p2p in (("p2p", True), ("no_p2p", False))
    }


def gate_section(state_dir: str) -> dict[str, Any]:
    """Return a section `gate` as a plan carries it."""
    return {
        "mode": "enforce",
        "on_unknown": "refuse",
        "timeout": 20.0,
        "gpu_timeout": 10.0,
        "expected_gpus": None,
        "ecc": {
            "require_enabled": True,
            "retired_pages_fail": 60,
            "retired_pages_warn": 15,
            "sbe_lifetime_warn": 100_000,
            "sbe_per_day_warn": 1_000,
        },
        "p2p": {
            "policy": "auto",
            "functional_test": True,
            "test_timeout": TIMEOUT_S,
            "test_bytes_mib": 64,
        },
        "pcie": {
            "min_width": 8,
            "tensor_rate_fail": 7.5,
            "tensor_rate_warn": 15.0,
            "pipeline_rate_fail": 2.0,
            "rate_warn": 7.5,
        },
        "thermal": {"gpu_warn_c": 83, "hbm_margin_warn_c": 7, "slowdown_c": 87, "idle_warn_c": 75},
        "state_dir": state_dir,
        "overrides": [],
    }


def whole_gate(host: HostFacts) -> dict[str, Any]:
    """Run the gate from start to end; any card but a V100 is refused by design."""
    two = len(host.gpus) > 1
    with tempfile.TemporaryDirectory() as state:
        plan = GatePlan(
            kind="tp2" if two else "single",
            uuids=tuple(gpu.uuid or "" for gpu in host.gpus[: 2 if two else 1]),
            policy=policy_of(gate_section(state)),
        )
        started = time.monotonic()
        report = run(plan, Options())
        seconds = round(time.monotonic() - started, 2)
    Path(os.environ.get("OUT", "."), "machine.json").write_text(record_text(report.facts, plan))
    return {"seconds": seconds, "report": report.to_plain()}


def judged(result: dict[str, Any]) -> list[str]:
    """Return what does not hold."""
    wrong = [
        f"GPU {gpu['index']} {line['field']}: {line}"
        for gpu in result["gpus"]
        for line in gpu["fields"]
        if not line["agrees"]
    ]
    wrong += [f"pair {line['pair']}" for line in result["peers"] if not line["agrees"]]
    wrong += [
        f"GPU {gpu['index']} cuda: {gpu['alloc']}" for gpu in result["gpus"] if gpu["alloc"] != "ok"
    ]
    pair = result.get("pair")
    if pair:
        access = pair["plain"]["functional"] != "no_access"
        wanted = (
            {"plain": "ok", "lie_none": "ok", "lie_drop": "mismatch"}
            if access
            else {"plain": "no_access"}
        )
        wrong += [
            f"pair {name}: {pair.get(name, {}).get('functional')}, not {outcome}"
            for name, outcome in wanted.items()
            if pair.get(name, {}).get("functional") != outcome
        ]
        wrong += [
            f"collective {name}: {found}"
            for name, found in result["collective"].items()
            if isinstance(found, dict) and found["outcome"] != "ok"
        ]
    return wrong


def main() -> int:
    """Compare, write the result, return 0 when all of it holds."""
    host, rows = read_host(timeout_s=60.0, gpu_timeout_s=20.0), smi_rows()
    result: dict[str, Any] = {"driver": host.driver_version, "nvml": host.nvml_version, "gpus": []}
    for gpu, row in zip(host.gpus, rows, strict=True):
        proven, _ = probe_gpu(gpu, TIMEOUT_S)
        link = {name: value for name, value in to_plain(proven.pcie).items() if "load" in name}
        result["gpus"].append(
            {
                "index": gpu.index,
                "name": gpu.name,
                "fields": compared(gpu, row),
                "alloc": proven.alloc,
                "link": link,
            }
        )
    result["peers"] = peers_agree(host)
    if len(host.gpus) > 1:
        result["pair"] = pair_results(host)
        result["collective"] = collective_results(host)
    result["gate"] = whole_gate(host)
    result["wrong"] = judged(result)
    Path(os.environ.get("OUT", "."), "gate.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(json.dumps({key: result[key] for key in ("driver", "wrong")}, indent=1) + "\n")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
