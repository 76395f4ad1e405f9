#!/usr/bin/env python3
"""Audits what an image carries for which GPU; `make image` runs it inside the build.

    audit_image.py files ROOT [--need NAME ...] [--report FILE]
        the device code of every shared object below ROOT
    audit_image.py kernels LIBRARY --sources DIR [--report FILE]
        every kernel of ours, by name, has code for sm_70
    audit_image.py system ROOT
        no library of the driver, no cuda-compat on the loader's path
    audit_image.py launch
        as the serving user: the engine's modules load, Triton builds its launcher

Standard library only. Exit 0, or 1 with `error[CODE] WHERE: WHAT, got VALUE; FIX.` on stderr for
every finding.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import mmap
import os
import re
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

VOLTA = 70
FATBIN_MAGIC = 0xBA55ED50
_PTX, _ELF = 1, 2
_HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of the header, bytes of the entries
_ENTRY = struct.Struct("<HHIQ")  # kind, -, bytes of the header, bytes of the code
_ARCH_OFFSET = 28

OURS = "libnvfp4_sm70.so"
NEEDED = {
    "appliance": re.compile(r"libnvfp4_sm70\.so$"),
    "torch": re.compile(r"libtorch_cuda\.so$"),
    "nccl": re.compile(r"libnccl\.so"),
}


class AuditError(Exception):
    """One finding; the message is the line."""

    def __init__(self, code: str, where: str, what: str, value: str, fix: str) -> None:
        """Put the line together."""
        super().__init__(f"error[{code}] {where}: {what}, got {value}; {fix}.")


@dataclass(frozen=True)
class DeviceCode:
    """Architectures of one shared object: compiled code and PTX, as 70 for sm_70 and compute_70."""

    path: str
    sass: tuple[int, ...]
    ptx: tuple[int, ...]


def device_code(path: Path, root: Path) -> DeviceCode | None:
    """Return the architectures of a file's device code, None if it holds none."""
    if path.stat().st_size < _HEADER.size:
        return None
    found: dict[int, set[int]] = {_PTX: set(), _ELF: set()}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"\x7fELF":
            return None
        magic = struct.pack("<I", FATBIN_MAGIC)
        at = data.find(magic)
        while at >= 0:
            at = data.find(magic, _read_fatbin(data, at, found))
    if not any(found.values()):
        return None
    sass, ptx = (tuple(sorted(found[kind])) for kind in (_ELF, _PTX))
    return DeviceCode(str(path.relative_to(root)), sass, ptx)


def _read_fatbin(data: mmap.mmap, at: int, found: dict[int, set[int]]) -> int:
    """Note the entries of the container at an offset; return where to look for the next one."""
    if at % 8 or at + _HEADER.size > len(data):
        return at + 4
    version: int
    header: int
    size: int
    _, version, header, size = _HEADER.unpack_from(data, at)
    end = at + header + size
    if version != 1 or header != _HEADER.size or end > len(data):
        return at + 4
    position = at + header
    while position + _ARCH_OFFSET + 4 <= end:
        kind, _, entry_header, entry_size = _ENTRY.unpack_from(data, position)
        if kind not in found or entry_header < _ARCH_OFFSET + 4:
            break
        (arch,) = struct.unpack_from("<I", data, position + _ARCH_OFFSET)
        found[kind].add(arch)
        position += entry_header + entry_size
    return end


def audit_files(root: Path, needed: list[str], report: Path | None) -> list[AuditError]:
    """List every shared object with device code; those needed must hold code for sm_70."""
    libraries = (path for path in root.rglob("*.so*") if path.is_file() and not path.is_symlink())
    rows = [row for path in sorted(libraries) if (row := device_code(path, root)) is not None]
    for row in rows:
        _say(f"{row.path}  sass {_names('sm', row.sass)}  ptx {_names('compute', row.ptx)}")
    _write(report, [row.__dict__ for row in rows])
    findings: list[AuditError] = []
    for name in needed:
        matching = [row for row in rows if NEEDED[name].search(row.path)]
        if not matching:
            what, fix = "needs a library with device code", "build the image without the stand-in"
            findings.append(AuditError("NO_DEVICE_CODE", name, what, "none in the image", fix))
        findings += [
            AuditError(
                "NO_SM70",
                row.path,
                "must hold code for sm_70",
                _names("sm", row.sass),
                "install a build for it",
            )
            for row in matching
            if VOLTA not in row.sass
        ]
    return findings


def audit_kernels(library: Path, sources: Path, report: Path | None) -> list[AuditError]:
    """Hold the kernels that the sources define against the library's entries, by architecture."""
    dump = subprocess.run(
        ("cuobjdump", "-symbols", str(library)),  # noqa: S607 - the toolchain's, by PATH
        capture_output=True,
        text=True,
        check=True,
    )
    table = entries(dump.stdout)
    names = sorted({name for path in sources.rglob("*.cu*") for name in kernels(path.read_text())})
    findings = [] if names else [_missing("every kernel", "no kernel in the sources")]
    for name in names:
        own = {
            arch: [e for e in found if f"{len(name)}{name}" in e] for arch, found in table.items()
        }
        counts = {arch: len(found) for arch, found in own.items() if found}
        _say(
            f"{name}  {', '.join(f'{arch} {count}' for arch, count in counts.items()) or 'absent'}"
        )
        if not counts.get("sm_70"):
            findings.append(_missing(name, ", ".join(counts) or "no entry"))
    _write(report, {arch: sorted(found) for arch, found in table.items()})
    return findings


def _missing(name: str, value: str) -> AuditError:
    return AuditError("KERNEL_WITHOUT_SM70", name, "must have an entry for sm_70", value, "rebuild")


def kernels(text: str) -> list[str]:
    """Return the names of the kernels that a source defines."""
    plain = re.sub(r"//[^\n]*", "", text)
    plain = re.sub(r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)", "", plain)
    return re.findall(r"__global__\s+(?:static\s+|inline\s+)*void\s+(\w+)\s*\(", plain)


def entries(dump: str) -> dict[str, list[str]]:
    """Return the kernel entries of every architecture from the output of `cuobjdump -symbols`."""
    table: dict[str, list[str]] = {}
    arch = ""
    for line in dump.splitlines():
        if found := re.match(r"arch = (\w+)", line):
            arch = found[1]
        elif "STO_ENTRY" in line:
            table.setdefault(arch, []).append(line.split()[-1])
    return table


def audit_system(root: Path) -> list[AuditError]:
    """The driver comes from the host; a library of it, or a compat directory, would shadow it."""
    findings: list[AuditError] = []
    for pattern in ("libcuda.so*", "libnvidia-ml.so*", "libnvidia-ptxjitcompiler.so*"):
        for folder in ("usr", "opt", "lib"):
            for path in sorted((root / folder).rglob(pattern)):
                if "stubs" not in path.parts:
                    what, fix = "the driver's libraries must come from the host", "remove it"
                    findings.append(AuditError("DRIVER_IN_IMAGE", str(path), what, "a file", fix))
    configured = [root / "etc/ld.so.conf", *sorted((root / "etc/ld.so.conf.d").glob("*"))]
    for path in configured:
        text = path.read_text(errors="replace") if path.is_file() else ""
        if "compat" in text:
            what, fix = "must not name a cuda-compat directory", "remove the line"
            findings.append(AuditError("CUDA_COMPAT", str(path), what, text.strip(), fix))
    return findings


def audit_launch() -> list[AuditError]:
    """What a first request needs besides a GPU: the engine's modules, Triton with a compiler."""
    findings: list[AuditError] = []
    modules = (
        "torch",
        "triton",
        "vllm.entrypoints.openai.api_server",
        "vllm._C_stable_libtorch",
        "vllm.platforms.cuda",
        "vllm.v1.engine.core",
        "vllm.v1.worker.gpu_worker",
        "vllm.v1.attention.backends.triton_attn",
        "appliance.vllm_plugin.ops",
        "appliance.serve.run",
        "healthchecks.facts",
    )
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever a module does at import is the finding
            value, fix = f"{type(error).__name__}: {error}", "see the build's log"
            findings.append(AuditError("IMPORT", name, "must load", value, fix))
    return findings or _launcher()


def _launcher() -> list[AuditError]:
    """Let Triton build the module through which it launches kernels, as it does at the first one.

    It links the driver's library, which no build has: an empty one takes its place, and functions
    are resolved when they are called, which nothing here does.
    """
    compiler = os.environ.get("CC", "gcc")
    with tempfile.TemporaryDirectory() as folder:
        stand_in = Path(folder, "libcuda.so.1")
        link = ("-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull, "-o", str(stand_in))
        os.environ["TRITON_LIBCUDA_PATH"] = folder
        sys.setdlopenflags(os.RTLD_LAZY)
        try:
            subprocess.run((compiler, *link), capture_output=True, text=True, check=True)
            ctypes.CDLL(str(stand_in), mode=ctypes.RTLD_GLOBAL)
            utils = importlib.import_module("triton.backends.nvidia.driver").CudaUtils()
            _say(f"launcher of Triton: built, {utils.launch.__name__}")
        except (OSError, subprocess.CalledProcessError, ImportError, RuntimeError) as error:
            said = str(getattr(error, "stderr", None) or error).strip()[:300]
            what, fix = (
                "must build the launcher of Triton",
                "install gcc, libc6-dev and Python's headers",
            )
            return [AuditError("NO_CC", compiler, what, said, fix)]
    return []


def _names(prefix: str, archs: tuple[int, ...]) -> str:
    return " ".join(f"{prefix}_{arch}" for arch in archs) or "none"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _write(report: Path | None, content: object) -> None:
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps(content, indent=1) + "\n")


def main() -> int:
    """Run one audit."""
    parser = argparse.ArgumentParser(description=__doc__)
    audits = parser.add_subparsers(dest="audit", required=True)
    files = audits.add_parser("files")
    files.add_argument("root", type=Path)
    files.add_argument("--need", nargs="*", choices=tuple(NEEDED), default=["appliance"])
    files.add_argument("--report", type=Path)
    ours = audits.add_parser("kernels")
    ours.add_argument("library", type=Path)
    ours.add_argument("--sources", type=Path, required=True)
    ours.add_argument("--report", type=Path)
    audits.add_parser("system").add_argument("root", type=Path)
    audits.add_parser("launch")
    given = parser.parse_args()
    if given.audit == "files":
        findings = audit_files(given.root, given.need, given.report)
    elif given.audit == "kernels":
        findings = audit_kernels(given.library, given.sources, given.report)
    elif given.audit == "system":
        findings = audit_system(given.root)
    else:
        findings = audit_launch()
    for finding in findings:
        sys.stderr.write(f"{finding}\n")
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
