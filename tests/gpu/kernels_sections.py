"""The sections of the device checks by name, in the order they run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from kernels_attention import run_attention, run_attention_graphs
from kernels_cases import run_cases
from kernels_contract import (
    run_graphs,
    run_no_allocation,
    run_refusals,
    run_same_bits,
    run_self_test,
)
from kernels_device import Device
from kernels_exact import run_dense, run_grouped, run_repack
from kernels_gdn import run_gdn, run_gdn_graphs
from kernels_matrix import run_foreign_rows, run_groups, run_matrix, run_overflow, run_slices
from kernels_moe import run_moe
from kernels_report import Report
from kernels_small_ops import run_small_ops
from kernels_speed import run_speed

from appliance.nvfp4.library import Library

if TYPE_CHECKING:
    from pathlib import Path


class Run(Protocol):
    def __call__(self, device: Device, report: Report, *, quick: bool) -> None: ...


@dataclass(frozen=True)
class Section:
    """One section: what it runs, how long it may take, and whether it needs CUDA itself."""

    run: Run
    limit_s: float = 100.0
    needs_cuda: bool = False


SECTIONS: dict[str, Section] = {
    # First: the driver compiles the PTX here, and what it says about memory needs a quiet device.
    "self_test": Section(run_self_test, limit_s=240.0),
    "no_allocation": Section(run_no_allocation, needs_cuda=True),
    "speed": Section(run_speed, needs_cuda=True),
    "cases": Section(run_cases),
    "refusals": Section(run_refusals),
    "same_bits": Section(run_same_bits),
    "graphs": Section(run_graphs, needs_cuda=True),
    "exact_repack": Section(run_repack),
    "exact_dense": Section(run_dense),
    "exact_grouped": Section(run_grouped),
    "overflow": Section(run_overflow),
    "groups": Section(run_groups),
    "slices": Section(run_slices),
    "foreign_rows": Section(run_foreign_rows),
    "moe": Section(run_moe),
    "small_ops": Section(run_small_ops),
    "attention": Section(run_attention, limit_s=200.0),
    "attention_graphs": Section(run_attention_graphs, needs_cuda=True),
    "gdn": Section(run_gdn, limit_s=200.0),
    "gdn_graphs": Section(run_gdn_graphs, needs_cuda=True),
    "matrix": Section(run_matrix, limit_s=200.0),
}
QUIET = ("self_test", "no_allocation", "speed")
"""Sections that want the device for themselves."""


def run_section(name: str, library: Path, device_name: str, *, quick: bool) -> Report:
    """Run one section; an exception outside of its cases is a failure of it."""
    section = SECTIONS[name]
    begin = time.monotonic()
    # A section stops by itself a little before whoever watches it would end it.
    report = Report(name, deadline=begin + 0.9 * section.limit_s)
    try:
        section.run(Device(Library(library), device_name), report, quick=quick)
        if device_name == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - the report is the product
        report.fail(f"the section ended early: {type(error).__name__}: {error}")
    report.details["seconds"] = round(time.monotonic() - begin, 2)
    return report
