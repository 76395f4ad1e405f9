"""A GPU through its driver alone: memory for the rig, events for the clock; no toolkit."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

FLUSH_BYTES = 256 << 20
"""Written before each timed call, so that weights come from memory: more than any L2 of today."""


class Driver:
    """Device 0 in its primary context, which the library's own CUDA run time uses too."""

    def __init__(self) -> None:
        self._dll = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self._device = device
        self._flush = self.allocate(FLUSH_BYTES)
        self._events = [self._event() for _ in range(2)]

    def call(self, name: str, *arguments: Any) -> None:
        """Call the driver.

        Raises:
            RuntimeError: If it answers anything but success.
        """
        status = getattr(self._dll, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._dll.cuGetErrorName(status, ctypes.byref(text))
            raise RuntimeError(f"{name} gave {(text.value or b'?').decode()}")

    def name(self) -> str:
        """The device's name."""
        text = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", text, 128, self._device)
        return text.value.decode()

    def attribute(self, number: int) -> int:
        """A CUdevice_attribute."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    def version(self) -> int:
        """The CUDA version of the driver, 1000 * major + 10 * minor."""
        value = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(value))
        return value.value

    # ---- memory, as the rig wants it

    def allocate(self, nbytes: int) -> int:
        """Device memory."""
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(nbytes, 1)))
        return pointer.value

    def release(self, address: int) -> None:
        """Give it back."""
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def write(self, address: int, array: np.ndarray) -> None:
        """Copy a contiguous array to the device."""
        source, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, size)

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy bytes to the host, after all work enqueued before."""
        target = ctypes.create_string_buffer(nbytes)
        self.call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        return target.raw

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Enqueue a copy on the device."""
        addresses = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self.call("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(nbytes), None)

    # ---- time

    def _event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), 0)
        return event

    def median_us(self, run: Callable[[], None], rounds: int) -> float:
        """The median time of a call whose weights are in memory, not in L2; by events."""
        begin, end = self._events
        times = []
        for _ in range(rounds):
            flush = ctypes.c_uint64(self._flush)
            self.call("cuMemsetD8Async", flush, 0, ctypes.c_size_t(FLUSH_BYTES), None)
            self.call("cuEventRecord", begin, None)
            run()
            self.call("cuEventRecord", end, None)
            self.call("cuEventSynchronize", end)
            milliseconds = ctypes.c_float()
            self.call("cuEventElapsedTime", ctypes.byref(milliseconds), begin, end)
            times.append(milliseconds.value * 1e3)
        return sorted(times)[rounds // 2]
