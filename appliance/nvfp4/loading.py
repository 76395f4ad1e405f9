"""Loads a kernel library and checks that it speaks this package's ABI."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from appliance.errors import ExitCode, Fault
from appliance.nvfp4 import abi, attention, gdn
from appliance.nvfp4.error import LibraryError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


SIGNATURES = abi.SIGNATURES | attention.SIGNATURES | gdn.SIGNATURES
"""Argument types of every call that returns a status."""


def load(path: Path) -> ctypes.CDLL:
    """Return the library at `path` with the types of its functions declared.

    Raises:
        LibraryError: NVFP4_LIBRARY_MISSING, NVFP4_LIBRARY_UNLOADABLE or NVFP4_ABI (exit 40).
    """
    dll = _open(path)
    _check_abi(dll, path)
    for name in ("nvfp4_build_info", "nvfp4_last_error", "nvfp4_kernel_name"):
        getattr(dll, name).restype = ctypes.c_char_p
    dll.nvfp4_kernel_name.argtypes = [ctypes.c_int32]
    for name, types in SIGNATURES.items():
        function = getattr(dll, name)
        function.restype = ctypes.c_int32
        function.argtypes = list(types)
    return dll


def _open(path: Path) -> ctypes.CDLL:
    build = "make kernels" if "sm70" in path.name else "make native"
    if not path.is_file():
        fault = Fault(
            "NVFP4_LIBRARY_MISSING", str(path), "the kernel library", "no file", f"run `{build}`"
        )
        raise LibraryError(ExitCode.ENGINE_START, fault)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        fault = Fault(
            "NVFP4_LIBRARY_UNLOADABLE",
            str(path),
            "the kernel library must load into this process",
            str(error),
            f"run `{build}` on this machine",
        )
        raise LibraryError(ExitCode.ENGINE_START, fault) from error


def _check_abi(dll: ctypes.CDLL, path: Path) -> None:
    found = _abi_version(dll)
    is_same_major = found is not None and found >> 16 == abi.ABI_VERSION >> 16
    if found is not None and is_same_major and found >= abi.ABI_VERSION:
        missing = _missing_symbols(dll, SIGNATURES)
        if not missing:
            return
        value = f"no {', '.join(missing)}"
    else:
        value = "no version" if found is None else f"{found >> 16}.{found & 0xFFFF}"
    wanted = f"ABI {abi.ABI_VERSION >> 16}.{abi.ABI_VERSION & 0xFFFF} or a later minor"
    fault = Fault("NVFP4_ABI", str(path), wanted, value, "rebuild it from the same checkout")
    raise LibraryError(ExitCode.ENGINE_START, fault)


def _abi_version(dll: ctypes.CDLL) -> int | None:
    try:
        function = dll.nvfp4_abi_version
    except AttributeError:
        return None
    function.restype = ctypes.c_uint32
    return int(function())


def _missing_symbols(dll: ctypes.CDLL, names: Iterable[str]) -> list[str]:
    return [name for name in names if not hasattr(dll, name)]
