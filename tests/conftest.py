"""Shared by every test folder: GPU tests say why they are skipped, no example has a time limit."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).parents[1]

# As `make test` sets it: a plain `pytest` starts scripts under the same rule.
os.environ["PYTHONSAFEPATH"] = "1"


# A busy machine takes its time: hypothesis' own limit is 200 ms an example.
settings.register_profile(
    "appliance", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("appliance")


def has_gpu() -> bool:
    """Tell whether a CUDA driver is loaded and lists at least one device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        and count.value > 0
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where none is."""
    if has_gpu():
        return
    without_gpu = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(without_gpu)


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY
