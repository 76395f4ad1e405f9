"""Which kernel library computes on a tensor's device, and how its calls name types and streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.nvfp4 import abi
from appliance.nvfp4.library import LIBRARY_DIR, reference_library, sm70_library

if TYPE_CHECKING:
    from appliance.nvfp4.library import Library

GPU_LIBRARY = "libnvfp4_sm70.so"

TYPES = {torch.float16: abi.Type.F16, torch.float32: abi.Type.F32}
"""Types of activations that the kernels read and write."""


def has_gpu_library() -> bool:
    """Say if this installation carries the library for GPUs; the processes that compute load it."""
    return (LIBRARY_DIR / GPU_LIBRARY).is_file()


def library_of(device: torch.device) -> Library:
    """Return the library that computes on memory of a device.

    Raises:
        LibraryError: If it is missing or of another version.
    """
    return sm70_library() if device.type == "cuda" else reference_library()


def stream_of(device: torch.device) -> int:
    """Return the stream that torch enqueues on now: under capture, that of the graph."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def type_of(tensor: torch.Tensor) -> abi.Type:
    """Return the kernels' name of a tensor's type.

    Raises:
        ApplianceError: E_ACTIVATION_TYPE for another than float16 and float32.
    """
    found = TYPES.get(tensor.dtype)
    if found is None:
        name = str(tensor.dtype).removeprefix("torch.")
        what, fix = "kernels compute in float16 or float32", "serve the model with dtype float16"
        fault = Fault("E_ACTIVATION_TYPE", "dtype", what, name, fix)
        raise ApplianceError(ExitCode.ENGINE_START, fault)
    return found


def room(size: int, device: torch.device) -> torch.Tensor:
    """Return `size` bytes that are aligned as buffers, plans and workspaces must be.

    torch's own allocator aligns GPU memory to 512 bytes, host memory to 64 only.
    """
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.uint8, device=device)
    whole = torch.empty(size + abi.BUFFER_ALIGNMENT, dtype=torch.uint8, device=device)
    begin = -whole.data_ptr() % abi.BUFFER_ALIGNMENT
    return whole[begin : begin + size]


def address_of(tensor: torch.Tensor | None) -> int:
    """Return where an argument lies that a call may lack: 0 for none and for an empty one."""
    return 0 if tensor is None or not tensor.numel() else tensor.data_ptr()
