"""The checks of the modelled V100 on any torch device, and the program that a sanitizer watches."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import torch
from sm70_attention_cases import ATTENTION_CASES
from sm70_cases import CASES
from sm70_gdn_cases import GDN_CASES
from sm70_more_cases import MORE_CASES
from sm70_rig import Rig

from appliance.nvfp4 import abi

if TYPE_CHECKING:
    from kernels_device import Device
    from kernels_report import Report

ALL_CASES = CASES | MORE_CASES | ATTENTION_CASES | GDN_CASES
# The plan of the host library keeps what it was made for, and it wants a workspace for gate_up.
NOT_ON_HOST = frozenset(name for name in MORE_CASES if "grouped" in name or "maps" in name)


class TorchMemory:
    """Device memory out of torch, copied without any kernel of torch's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._held: dict[int, torch.Tensor] = {}

    def allocate(self, nbytes: int) -> int:
        slack = 0 if self._name == "cuda" else abi.BUFFER_ALIGNMENT
        raw = torch.empty(max(nbytes, 1) + slack, dtype=torch.uint8, device=self._name)
        start = -raw.data_ptr() % abi.BUFFER_ALIGNMENT if slack else 0
        held = raw[start : start + nbytes]
        self._held[held.data_ptr()] = held
        return held.data_ptr()

    def release(self, address: int) -> None:
        self._held.pop(address, None)

    def write(self, address: int, array: np.ndarray) -> None:
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        self._held[address].copy_(torch.from_numpy(raw.copy()))

    def read(self, address: int, nbytes: int) -> bytes:
        return self._held[address][:nbytes].cpu().numpy().tobytes()


def run_cases(device: Device, report: Report, *, quick: bool) -> None:
    """Every named check, each on memory of its own."""
    names = [name for name in ALL_CASES if device.is_cuda or name not in NOT_ON_HOST]
    for name in names:
        rig = Rig(device.library, TorchMemory(device.name))
        with report.case(name):
            ALL_CASES[name](rig)
        rig.release()
    uncached = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"
    report.details.update(cases=names, quick=quick, one_allocation_each=uncached)
