"""Checks libnvfp4_sm70.so on an NVIDIA GPU through its compute_70 PTX, against FP64 and torch.

Needs Python 3.11, torch with CUDA, numpy, this checkout and the built library; compute-sanitizer
for two of the sections. Each section runs on its own failures; a section that hangs or kills the
device's context takes only itself down. Results go to kernels.json in $OUT (or --out), a table to
stdout; the exit code is 0 only if every section passed.

    python3 tests/gpu/run_kernels.py [--library FILE] [--only SECTION ...]
    python3 tests/gpu/run_kernels.py --device cpu --quick    # libnvfp4_ref.so, to test this program
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve()
REPOSITORY = SCRIPT.parents[2]
# At the end, so that the folder kernels/ never shadows a package of that name.
sys.path.extend(str(REPOSITORY / part) for part in ("tests/gpu", "tests/kernels/vsim", "."))

import torch  # noqa: E402 - found through the line above
from kernels_report import Report  # noqa: E402
from kernels_sanitizer import finish, start  # noqa: E402
from kernels_sections import QUIET, SECTIONS, run_section  # noqa: E402

from appliance.nvfp4.library import Library  # noqa: E402

LIBRARIES = {"cuda": "libnvfp4_sm70.so", "cpu": "libnvfp4_ref.so"}
START_LIMIT_S = 60.0
MEANING = (
    "The driver compiled this library's compute_70 PTX for another GPU: the source's arithmetic, "
    "indexing, contracts and races are tested, not the sm_70 machine code. mma.m8n8k4 exists in "
    "hardware on Volta only and is emulated here many times slower: times of products say nothing "
    "about a V100."
)


def main() -> int:
    options = parse()
    # The driver compiles the PTX once; every later process, a sanitizer's too, takes it from here.
    os.environ.setdefault("CUDA_CACHE_PATH", f"{tempfile.gettempdir()}/nvfp4_ptx_cache")
    os.environ.setdefault("CUDA_CACHE_MAXSIZE", str(4 << 30))
    if options.child:
        return run_child(options)
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    results = run_all(options, begin + options.total_s)
    document = {
        "ok": all(result["ok"] for result in results),
        "seconds": round(time.monotonic() - begin, 1),
        "machine": machine_of(options),
        "meaning": MEANING if options.device == "cuda" else "the reference library on the CPU",
        "sections": results,
    }
    target = options.out / "kernels.json"
    target.write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.write(table_of(document) + f"{target}\n")
    return 0 if document["ok"] else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=LIBRARIES, default="cuda")
    parser.add_argument("--library", type=Path)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"))
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS, "sanitizers"])
    parser.add_argument("--quick", action="store_true", help="few and small sizes")
    parser.add_argument("--total-s", type=float, default=450.0, help="seconds for everything")
    parser.add_argument("--child", nargs="+", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = Path(options.out or REPOSITORY / "kernels" / "build-gpu")
    if options.library is None:
        options.library = REPOSITORY / "appliance" / "lib" / LIBRARIES[options.device]
    return options


def run_child(options: argparse.Namespace) -> int:
    """Run sections in this process; a line of JSON for each as soon as it is done."""
    for name in options.child:
        report = run_section(name, options.library, options.device, quick=options.quick)
        sys.stdout.write(json.dumps(report.as_dict()) + "\n")
        sys.stdout.flush()
        if options.device == "cuda" and not is_alive():
            # A sticky fault: what is left needs a new context.
            sys.stdout.flush()
            os._exit(3)
    return 0


def is_alive() -> bool:
    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - any fault means the context is gone
        return False
    return True


def run_all(options: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """Quiet sections first, then the sanitizers beside all others."""
    wanted = options.only or [*SECTIONS, "sanitizers"]
    names = [name for name in SECTIONS if name in wanted]
    if options.device == "cpu":
        names = [name for name in names if not SECTIONS[name].needs_cuda]
    quiet = [name for name in names if name in QUIET]
    results = run_children(options, quiet, deadline)
    watches = []
    has_sanitizers = options.device == "cuda" and "sanitizers" in wanted
    if has_sanitizers:
        watches = start(SCRIPT, options.library, options.out)
    results += run_children(options, [name for name in names if name not in QUIET], deadline)
    if has_sanitizers:
        report = Report("sanitizers", deadline=deadline)
        finish(watches, report)
        results.append(report.as_dict())
    return results


def run_children(
    options: argparse.Namespace, names: list[str], deadline: float
) -> list[dict[str, Any]]:
    """Run sections in a child; when it dies or hangs, the next child takes the ones left."""
    results: list[dict[str, Any]] = []
    left = list(names)
    while left:
        if time.monotonic() > deadline:
            results += [lost(name, "the time for everything was up", 0.0) for name in left]
            break
        child = Child(options, left)
        begin = time.monotonic()
        first = True
        while left:
            limit = SECTIONS[left[0]].limit_s + (START_LIMIT_S if first else 0.0)
            result = child.next(min(limit, deadline - time.monotonic()))
            if result is None:
                break
            first = False
            results.append(result)
            say(result)
            left.remove(result["section"])
        words = child.end()
        if left:
            results.append(lost(left.pop(0), words, time.monotonic() - begin))
            say(results[-1])
    return results


class Child:
    """A process that runs sections and says what each found."""

    def __init__(self, options: argparse.Namespace, names: list[str]) -> None:
        command = [sys.executable, str(SCRIPT), "--child", *names]
        command += ["--library", str(options.library), "--device", options.device]
        command += ["--quick"] if options.quick else []
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._is_late = False
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._words: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def next(self, limit_s: float) -> dict[str, Any] | None:
        """The next section's result; None if the process ended or was too slow."""
        until = time.monotonic() + limit_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                self._is_late = True
                self._words.append("no answer in time")
                return None
            if line is None:
                return None
            if line.startswith('{"section"'):
                return dict(json.loads(line))
            self._words.append(line.strip())

    def end(self) -> str:
        """End the process and return its last words."""
        try:
            self._process.wait(timeout=0 if self._is_late else 20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        code = self._process.wait()
        self._reader.join()
        return f"exit {code}: " + " / ".join(self._words[-6:])


def lost(name: str, words: str, seconds: float) -> dict[str, Any]:
    report = Report(name)
    report.fail(f"the process running it was lost: {words}")
    report.details["seconds"] = round(seconds, 2)
    return report.as_dict()


def say(result: dict[str, Any]) -> None:
    """One line a section while the others still run."""
    sys.stdout.write(line_of(result) + "\n")
    for failure in result["failures"]:
        sys.stdout.write(f"    {failure[:600]}\n")
    sys.stdout.flush()


def line_of(result: dict[str, Any]) -> str:
    verdict = "ok" if result["ok"] else f"FAILED {result['failed']}"
    seconds = result["details"].get("seconds", "")
    return f"{result['section']:16} {verdict:12} {result['checks']:6} checks {seconds:>8} s"


def table_of(document: dict[str, Any]) -> str:
    lines = ["", document["machine"]["device"], document["machine"]["library"]]
    lines += [line_of(result) for result in document["sections"]]
    lines += [f"    {f[:300]}" for result in document["sections"] for f in result["failures"][:3]]
    verdict = "all passed" if document["ok"] else "FAILED"
    return "\n".join([*lines, f"{verdict} in {document['seconds']} s", ""])


def machine_of(options: argparse.Namespace) -> dict[str, Any]:
    """Which device, driver and library the results belong to."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"CPU {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "library": str(options.library),
    }
    if options.library.is_file():
        found["library"] = Library(options.library).build_info()
        found["library_sha256"] = hashlib.sha256(options.library.read_bytes()).hexdigest()
    if options.device == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = f"{properties.name}, sm_{properties.major}{properties.minor}"
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        try:
            driver = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
            found["driver"] = driver.stdout.strip()
        except OSError as error:
            found["driver"] = f"unknown: {error}"
    return found


if __name__ == "__main__":
    raise SystemExit(main())
