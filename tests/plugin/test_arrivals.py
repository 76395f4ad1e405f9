"""FP8 matrices are paired with their scales and decoded whole; what cannot be right is refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

from appliance.errors import ApplianceError
from appliance.vllm_plugin import arrivals
from appliance.vllm_plugin.arrivals import Arrivals, StoredMatrix

ROWS, COLUMNS = 200, 300
CPU = torch.device("cpu")
SHAPES = [(), (1,), (ROWS,), (ROWS, 1), (2, 3), (2, 1, 3, 1)]


def codes(rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    """Return random E4M3 numbers without NaN."""
    bits = np.random.default_rng(4).integers(0, 256, (rows, columns), dtype=np.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0
    return bits.view(ml_dtypes.float8_e4m3fn)


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn)


def scales(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(5).uniform(0.001, 0.1, shape).astype(np.float32)


def expected(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Spread the scale element by element and multiply."""
    rows, columns = np.indices(values.shape)
    blocks = (-(-values.shape[0] // 128), -(-values.shape[1] // 128))
    if scale.size == 1:
        spread = np.full(values.shape, scale.reshape(()))
    elif scale.size == values.shape[0]:
        spread = scale.reshape(-1)[rows]
    else:
        spread = scale.reshape(blocks)[rows // 128, columns // 128]
    return values.astype(np.float32) * spread


@pytest.mark.parametrize("slab", [1, 700, 1 << 22])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_of_every_kind_of_scale_decodes_to_the_product(
    shape: tuple[int, ...], slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "_SLAB", slab)
    values, scale = codes(), scales(shape)
    matrix = StoredMatrix("m", tensor(values), torch.from_numpy(np.asarray(scale)), "weight_scale")

    decoded = matrix.decode(torch.float32, CPU)

    np.testing.assert_array_equal(decoded.numpy(), expected(values, scale))
    halves = matrix.decode(torch.float16, CPU).numpy()
    np.testing.assert_array_equal(halves, expected(values, scale).astype(np.float16))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 128), (128, 1), (130, 128), (256, 64)])
def test_fp8_blocks_of_narrow_matrices_are_told_from_rows(rows: int, columns: int) -> None:
    values, scale = codes(rows, columns), scales((-(-rows // 128), -(-columns // 128)))
    matrix = StoredMatrix("m", tensor(values), torch.from_numpy(scale), "weight_scale_inv")

    decoded = matrix.decode(torch.float32, CPU)

    np.testing.assert_array_equal(decoded.numpy(), expected(values, scale))


def test_matrix_of_16_bits_is_given_as_it_is() -> None:
    weight = torch.randn(3, 5).to(torch.bfloat16)

    assert StoredMatrix("m", weight).decode(torch.float16, CPU) is weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, s: (w, s.reshape(-1)[:7]), "error[E_SCALE_SHAPE] m.weight_scale: "),
        (lambda w, s: (w, s * -1), "error[E_GLOBAL_INVALID] m.weight_scale: "),
        (lambda w, s: (w, s * torch.nan), "error[E_GLOBAL_INVALID] m.weight_scale: "),
        (lambda w, s: (w, s * 0), "error[E_GLOBAL_INVALID] m.weight_scale: "),
        (
            lambda w, s: (torch.full_like(w.view(torch.uint8), 0xFF).view(w.dtype), s),
            "error[E_SCALE_NAN] m.weight: ",
        ),
        (lambda w, s: (w, s * 1e6), "error[E_FP16_RANGE] m.weight: "),
    ],
    ids=("shape", "negative", "nan", "zero", "nan weight", "too large"),
)
def test_fp8_that_cannot_be_right_is_refused(
    change: Callable[..., tuple[torch.Tensor, torch.Tensor]], message: str
) -> None:
    weight, scale = change(tensor(codes()), torch.from_numpy(scales((ROWS, 1))))

    with pytest.raises(ApplianceError, match=re.escape(message)):
        StoredMatrix("m", weight, scale, "weight_scale").decode(torch.float16, CPU)


def test_weight_of_another_shape_is_refused() -> None:
    with pytest.raises(ApplianceError, match=r"error\[E_SHAPE\] m\.weight: must have .* \[5, 3\]"):
        StoredMatrix("m", torch.zeros(3, 5)).check_shape(5, 3)


@pytest.mark.parametrize("first", ["weight", "weight_scale"])
def test_halves_of_a_matrix_meet_in_either_order(first: str) -> None:
    made = Arrivals("weight_scale")
    halves = {"weight": tensor(codes(4, 4)), "weight_scale": torch.ones(4, 1)}
    second = next(name for name in halves if name != first)

    assert made.enter((0, 1), first, "q", halves[first]) is None
    assert made.enter((2,), first, "v", halves[first]) is None
    found = made.enter((0, 1), second, "q", halves[second])

    assert found is not None
    assert (found.name, found.weight) == ("q", halves["weight"])
    assert found.scale is halves["weight_scale"]
    assert made.scale_bytes == 16 * (2 if first == "weight_scale" else 1)
    made.check_part(1, "q")
    with pytest.raises(ApplianceError, match=r"error\[E_MISSING_COMPANION\] v\." + second):
        made.check_part(2, "v")
    with pytest.raises(ApplianceError, match=r"error\[E_MISSING_TENSOR\] w\.weight: "):
        made.check_part(3, "w")


def test_part_that_came_in_another_tensor_is_refused() -> None:
    made = Arrivals(None)
    made.enter((0, 1), "weight", "qk", torch.zeros(2, 2))

    with pytest.raises(ApplianceError, match=r"error\[E_DUPLICATE_TENSOR\] k\.weight: "):
        made.enter((1,), "weight", "k", torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("scale_name", "dtype", "said"),
    [
        ("weight_scale", torch.bfloat16, "FP8 is expected, got bfloat16"),
        (None, torch.float8_e4m3fn, "weights of 16 or 32 bits are expected, got float8_e4m3fn"),
    ],
)
def test_weight_of_another_form_is_refused(
    scale_name: str | None, dtype: torch.dtype, said: str
) -> None:
    with pytest.raises(ApplianceError, match=r"E_CONFIG_TENSOR_MISMATCH\] m\.weight: " + said):
        Arrivals(scale_name).enter((0,), "weight", "m", torch.zeros(2, 2).to(dtype))
