"""The device checks themselves, on the CPU: right results pass, and wrong ones are found."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
sys.path.extend(str(REPOSITORY / part) for part in ("tests/gpu", "tests/kernels/vsim"))

import run_kernels  # noqa: E402 - found through the line above
from kernels_compare import assert_same, error_of, unguarded  # noqa: E402
from kernels_device import Device  # noqa: E402
from kernels_exact import every_product, one_hot  # noqa: E402
from kernels_moe import make_layer, random_ids, right_down  # noqa: E402
from kernels_report import Report  # noqa: E402
from kernels_sections import SECTIONS, run_section  # noqa: E402

from appliance.nvfp4.library import reference_library  # noqa: E402

LIBRARY = REPOSITORY / "appliance" / "lib" / "libnvfp4_ref.so"
ON_HOST = [name for name, section in SECTIONS.items() if not section.needs_cuda]


@pytest.fixture
def device() -> Device:
    return Device(reference_library(), "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_HOST)
def test_section_on_the_reference_finds_no_fault(name: str) -> None:
    report = run_section(name, LIBRARY, "cpu", quick=True)

    assert report.failures == []
    assert report.checks > 0


def test_error_of_one_wrong_element_is_seen() -> None:
    right = torch.ones(4, 100, dtype=torch.float64)
    found = right.half()
    found[2, 7] = 1.01

    error = error_of(found, right, right)

    assert error.norm < 1e-3
    assert error.element == pytest.approx(0.01, rel=0.1)
    assert error.at == (2, 7)


def test_error_of_an_unwritten_element_is_infinite() -> None:
    right = torch.ones(2, 3, dtype=torch.float64)
    found = right.half()
    found[1, 1] = torch.nan

    assert error_of(found, right, right).worst == float("inf")


def test_unguarded_after_a_write_past_an_edge_raises(device: Device) -> None:
    for row, column in ((0, 3), (2, 0)):
        whole = device.guarded(2, 3)
        whole[row, column] = 0
        with pytest.raises(AssertionError, match="wrote past"):
            unguarded(whole, 2, 3)


def test_one_swapped_nibble_is_named(device: Device) -> None:
    matrix = every_product(device, 48)
    packed = device.pack(matrix)
    # The low nibble of a byte is the even column.
    matrix.codes[1000, 10] ^= 1

    with pytest.raises(AssertionError, match=r"1 wrong, first at \[4, 1000\]"):
        assert_same(
            device.matmul(packed, one_hot(device, 8, 48, 16)),
            matrix.unscaled().T[16:24],
            "product",
        )


def test_tokens_of_another_expert_are_far_off(device: Device) -> None:
    layer = make_layer(device, 3, 48, 80)
    ids, x = random_ids(device, 5, 1, 3), device.tokens(5, 48)
    weights = torch.ones(5, 1)

    right = right_down(layer, ids, weights, x)
    other = right_down(layer, (ids + 1) % 3, weights, x)

    assert error_of(other.half(), right, right.abs().amax(1, keepdim=True)).norm > 0.1


def test_report_after_a_failed_case_goes_on() -> None:
    report = Report("any")
    for number in (1, 2):
        with report.case(f"case {number}"):
            if number == 1:
                raise AssertionError("is one")

    assert report.checks == 2
    assert report.failures == ["case 1: is one"]
    assert not report.as_dict()["ok"]


def test_child_that_cannot_load_the_library_is_a_failed_section(tmp_path: Path) -> None:
    options = argparse.Namespace(library=tmp_path / "absent.so", device="cpu", quick=True)

    (result,) = run_kernels.run_children(options, ["self_test"], deadline=float("inf"))

    assert not result["ok"]
    assert "NVFP4_LIBRARY_MISSING" in result["failures"][0]


def test_sections_past_the_deadline_are_failures() -> None:
    options = argparse.Namespace(library=LIBRARY, device="cpu", quick=True)

    results = run_kernels.run_children(options, ["self_test", "matrix"], deadline=0.0)

    assert [result["ok"] for result in results] == [False, False]


def test_products_without_their_global_are_found(device: Device) -> None:
    matrix = device.matrix(33, 48)
    other = replace(matrix, row_globals=matrix.row_globals.roll(1))

    found = device.matmul(device.pack(other), device.tokens(4, 48))

    right = device.tokens(4, 48).double() @ matrix.values().T
    assert error_of(found, right, right.abs()).norm > 0.1
