"""What the ledger makes of the tensors of one matrix, without an engine."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from appliance.checkpoint import values
from appliance.errors import ApplianceError
from appliance.vllm_plugin import ledger
from appliance.vllm_plugin.inventory import (
    COMPRESSED_TENSORS_NAMES,
    MODELOPT_NAMES,
    QUASAR_NAMES,
    Names,
)

MATRIX = ledger.Matrix("layer.q_proj", 4, 64)
ONE = 0x38  # E4M3 code of 1.0


def scales(fill: int = ONE, *, shape: tuple[int, ...] = (4, 4)) -> torch.Tensor:
    return torch.full(shape, fill, dtype=torch.uint8).view(torch.float8_e4m3fn)


def record_of(
    loaded: torch.Tensor, value: float, names: Names = MODELOPT_NAMES, *, codes: int = 0x21
) -> ledger.MatrixRecord:
    """Return the record of a matrix that arrived whole."""
    record = ledger.MatrixRecord()
    ledger.enter_codes(record, MATRIX, names, torch.full((4, 32), codes, dtype=torch.uint8))
    ledger.enter_scales(record, MATRIX, names, loaded)
    ledger.enter_global(record, MATRIX, names, torch.tensor([value]))
    return record


def refusal(code: str) -> pytest.RaisesExc[ApplianceError]:
    return pytest.raises(ApplianceError, match=re.escape(f"error[{code}] layer.q_proj."))


def test_ledger_whole_matrix_passes() -> None:
    assert ledger.check(record_of(scales(), 0.01), MATRIX, MODELOPT_NAMES) is False


@pytest.mark.parametrize("code", [0x00, 0x01, 0x07, 0x7E])
def test_ledger_every_kind_of_finite_scale_passes(code: int) -> None:
    assert ledger.check(record_of(scales(code), 0.01), MATRIX, MODELOPT_NAMES) is False


@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_ledger_nan_scale_is_refused_with_its_place(nan: int) -> None:
    loaded = scales()
    loaded.view(torch.uint8)[2, 3] = nan

    with refusal("E_SCALE_NAN") as caught:
        ledger.check(record_of(loaded, 0.01), MATRIX, MODELOPT_NAMES)

    assert "NaN at row 2, block 3" in str(caught.value)


@pytest.mark.parametrize("code", [0x80, 0x81, 0xFE])
def test_ledger_sign_bit_of_a_scale_is_refused(code: int) -> None:
    loaded = scales()
    loaded.view(torch.uint8)[1, 0] = code

    with refusal("E_SCALE_NEGATIVE") as caught:
        ledger.check(record_of(loaded, 0.01), MATRIX, MODELOPT_NAMES)

    assert "row 1, block 0" in str(caught.value)


@pytest.mark.parametrize("loaded", [scales(0xFF), scales(0x00)], ids=["nan", "zero"])
def test_ledger_zero_multiplier_over_dead_scales_is_a_zero_matrix(loaded: torch.Tensor) -> None:
    assert ledger.check(record_of(loaded, 0.0), MATRIX, MODELOPT_NAMES) is True


def test_ledger_zero_multiplier_over_zero_codes_is_a_zero_matrix() -> None:
    record = record_of(scales(), 0.0, codes=0x80)

    assert ledger.check(record, MATRIX, MODELOPT_NAMES) is True


@pytest.mark.parametrize(("dtype", "group"), [(torch.float16, 128), (torch.float32, 128)])
def test_ledger_wide_scales_of_quasar_are_checked_alike(dtype: torch.dtype, group: int) -> None:
    name = "F16" if dtype == torch.float16 else "F32"
    names = replace(QUASAR_NAMES, scale_dtype=name, has_global=False, group=group)
    matrix, record = ledger.Matrix("layer.q_proj", 4, 256), ledger.MatrixRecord()
    loaded = torch.full((4, 2), 0.01, dtype=dtype)
    loaded[3, 1] = torch.inf
    ledger.enter_codes(record, matrix, names, torch.full((4, 32), 7, dtype=torch.int32))
    ledger.enter_scales(record, matrix, names, loaded)

    with refusal("E_SCALE_NAN") as caught:
        ledger.check(record, matrix, names)

    assert "row 3, block 1" in str(caught.value)
    assert ledger.unwritten_scales(1, 2, scale_dtype=name).isnan().all()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("names", [MODELOPT_NAMES, COMPRESSED_TENSORS_NAMES], ids=["mo", "ct"])
def test_ledger_global_that_is_no_positive_number_is_refused(value: float, names: Names) -> None:
    with refusal("E_GLOBAL_INVALID"):
        ledger.check(record_of(scales(), value, names), MATRIX, names)


@pytest.mark.parametrize(
    ("names", "right", "wrong"),
    [(MODELOPT_NAMES, 1e-4, 1e4), (COMPRESSED_TENSORS_NAMES, 1e4, 1e-4)],
    ids=["mo", "ct"],
)
def test_ledger_direction_follows_the_name(names: Names, right: float, wrong: float) -> None:
    assert ledger.check(record_of(scales(), right, names), MATRIX, names) is False

    with refusal("E_GLOBAL_DIRECTION"):
        ledger.check(record_of(scales(), wrong, names), MATRIX, names)


def test_ledger_largest_believable_weight_passes_and_the_next_does_not() -> None:
    limit = values.LARGEST_WEIGHT / (6.0 * 448)

    assert ledger.check(record_of(scales(0x7E), limit * 0.99), MATRIX, MODELOPT_NAMES) is False
    with refusal("E_GLOBAL_DIRECTION"):
        ledger.check(record_of(scales(0x7E), limit * 1.01), MATRIX, MODELOPT_NAMES)


@pytest.mark.parametrize("missing", ["weight", "weight_scale", "weight_scale_2"])
def test_ledger_missing_tensor_is_named(missing: str) -> None:
    record = record_of(scales(), 0.01)
    if missing == "weight":
        record.codes = 0
    elif missing == "weight_scale":
        record.scales = 0
    else:
        record.globals.clear()

    with refusal("E_MISSING_COMPANION") as caught:
        ledger.check(record, MATRIX, MODELOPT_NAMES)

    assert f"layer.q_proj.{missing}:" in str(caught.value)


def test_ledger_matrix_without_any_tensor_is_missing() -> None:
    with refusal("E_MISSING_TENSOR"):
        ledger.check(ledger.MatrixRecord(), MATRIX, MODELOPT_NAMES)


def test_ledger_global_that_came_twice_is_refused() -> None:
    record = record_of(scales(), 0.01)
    ledger.enter_global(record, MATRIX, MODELOPT_NAMES, torch.tensor(0.01))

    with refusal("E_DUPLICATE_TENSOR"):
        ledger.check(record, MATRIX, MODELOPT_NAMES)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float8_e5m2])
def test_ledger_scales_of_another_type_are_refused(dtype: torch.dtype) -> None:
    with refusal("E_SCALE_DTYPE"):
        ledger.enter_scales(
            ledger.MatrixRecord(), MATRIX, MODELOPT_NAMES, torch.zeros(4, 4, dtype=dtype)
        )


@pytest.mark.parametrize("shape", [(4, 2), (4, 8), (128, 4), (16,)])
def test_ledger_scales_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with refusal("E_SCALE_SHAPE"):
        ledger.enter_scales(ledger.MatrixRecord(), MATRIX, MODELOPT_NAMES, scales(shape=shape))


def test_ledger_dense_weight_is_refused_with_the_exclude_to_add() -> None:
    with refusal("E_UNQUANTIZED_NOT_EXCLUDED") as caught:
        ledger.enter_codes(ledger.MatrixRecord(), MATRIX, MODELOPT_NAMES, torch.zeros(4, 64))

    assert "add layer.q_proj to the exclude list" in str(caught.value)


def test_ledger_columns_that_fill_no_block_are_stored_padded() -> None:
    padded = ledger.Matrix("layer.q_proj", 4, 40)
    record = ledger.MatrixRecord()

    ledger.enter_codes(record, padded, MODELOPT_NAMES, torch.zeros(4, 24, dtype=torch.uint8))
    ledger.enter_scales(record, padded, MODELOPT_NAMES, scales(shape=(4, 3)))

    assert (record.codes, record.scales) == (1, 1)


def test_ledger_scale_that_no_tensor_reached_is_found() -> None:
    loaded = ledger.unwritten_scales(3, 4)
    loaded.view(torch.uint8)[:2] = ONE

    with refusal("E_MISSING_COMPANION") as caught:
        ledger.check_no_sentinel(loaded, "layer.q_proj", MODELOPT_NAMES)

    assert "none at row 2, block 0" in str(caught.value)
