"""The few calls of the CUDA driver library that the probes need, by ctypes."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PEER_ALREADY_ENABLED = 704


class CudaError(Exception):
    """A call was refused; the message is the call and the driver's name for the reason."""


class Driver:
    """libcuda, opened and initialised.

    Raises:
        CudaError: If the library is absent or a call is refused, in every method.
    """

    def __init__(self) -> None:
        """Open the library and initialise it."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"libcuda.so.1: {error}") from error
        self._call("cuInit", 0)

    def device(self, bus_id: str) -> int:
        """Return the ordinal of the GPU at a PCI bus id."""
        found = c_int(0)
        self._call("cuDeviceGetByPCIBusId", byref(found), c_char_p(bus_id.encode()))
        return found.value

    def context(self, device: int) -> c_void_p:
        """Return the primary context of a device and make it current."""
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.enter(context)
        return context

    def enter(self, context: c_void_p) -> None:
        """Make a context current."""
        self._call("cuCtxSetCurrent", context)

    def allocate(self, size: int) -> int:
        """Return the address of `size` bytes on the current device."""
        address = c_uint64(0)
        self._call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address.value

    def pinned(self, size: int) -> int:
        """Return the address of `size` bytes of page-locked host memory."""
        address = c_void_p()
        self._call("cuMemHostAlloc", byref(address), c_size_t(size), 0)
        return address.value or 0

    def upload(self, target: int, data: bytes) -> None:
        """Copy bytes to the current device."""
        self._call("cuMemcpyHtoD_v2", c_uint64(target), data, c_size_t(len(data)))

    def upload_later(self, target: int, source: int, size: int) -> None:
        """Start a copy of page-locked host memory to the current device."""
        self._call("cuMemcpyHtoDAsync_v2", c_uint64(target), c_void_p(source), c_size_t(size), None)

    def download(self, source: int, size: int) -> bytes:
        """Copy bytes of the current device to the host."""
        data = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", data, c_uint64(source), c_size_t(size))
        return data.raw

    def synchronize(self) -> None:
        """Wait for everything the current context was given."""
        self._call("cuCtxSynchronize")

    def peer_access(self, device: int, peer: int) -> bool:
        """Tell whether the driver offers `device` access to the memory of `peer`."""
        found = c_int(0)
        self._call("cuDeviceCanAccessPeer", byref(found), device, peer)
        return bool(found.value)

    def enable_peer(self, peer: c_void_p) -> None:
        """Let the current context reach the memory of another one."""
        self._call("cuCtxEnablePeerAccess", peer, 0, allowed=(0, PEER_ALREADY_ENABLED))

    def copy_peer(self, target: int, to: c_void_p, source: int, of: c_void_p, size: int) -> None:
        """Copy between two contexts' memory, by the GPUs themselves where they may."""
        self._call(
            "cuMemcpyPeerAsync", c_uint64(target), to, c_uint64(source), of, c_size_t(size), None
        )

    def function(self, ptx: str, name: str) -> c_void_p:
        """Compile PTX for the current device and return one kernel of it."""
        module, function = c_void_p(), c_void_p()
        self._call("cuModuleLoadData", byref(module), c_char_p(ptx.encode()))
        self._call("cuModuleGetFunction", byref(function), module, c_char_p(name.encode()))
        return function

    def launch(self, function: c_void_p, blocks: int, threads: int, values: Sequence[int]) -> None:
        """Start a kernel whose parameters are all 64-bit."""
        cells = [c_uint64(value) for value in values]
        pointers = (c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
        grid = (blocks, 1, 1, threads, 1, 1)
        self._call("cuLaunchKernel", function, *grid, 0, None, pointers, None)

    def _call(self, name: str, *arguments: object, allowed: tuple[int, ...] = (0,)) -> None:
        status = getattr(self._library, name)(*arguments)
        if status not in allowed:
            raise CudaError(f"{name}: {self._name(status)}")

    def _name(self, status: int) -> str:
        text = c_char_p()
        if self._library.cuGetErrorName(status, byref(text)) or text.value is None:
            return f"error {status}"
        return f"{text.value.decode()} ({status})"
