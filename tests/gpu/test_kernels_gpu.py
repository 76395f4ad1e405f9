"""The device checks of run_kernels.py as tests: every section on the GPU of this machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.extend(str(REPOSITORY / part) for part in ("tests/gpu", "tests/kernels/vsim"))

from kernels_report import Report  # noqa: E402 - found through the line above
from kernels_sanitizer import find_sanitizer, finish, start  # noqa: E402
from kernels_sections import SECTIONS, run_section  # noqa: E402

LIBRARY = REPOSITORY / "appliance" / "lib" / "libnvfp4_sm70.so"

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("name", SECTIONS)
def test_section_on_this_gpu_finds_no_fault(name: str) -> None:
    report = run_section(name, LIBRARY, "cuda", quick=False)

    assert report.failures == []
    assert report.checks > 0


@pytest.mark.skipif(find_sanitizer() is None, reason="no compute-sanitizer")
def test_cases_under_sanitizers_are_clean(tmp_path: Path) -> None:
    report = Report("sanitizers", deadline=time.monotonic() + 400)

    finish(start(REPOSITORY / "tests" / "gpu" / "run_kernels.py", LIBRARY, tmp_path), report)

    assert report.failures == []
