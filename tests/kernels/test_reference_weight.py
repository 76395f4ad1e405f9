"""Packed weights of the reference library: any shape, any part, faults with coordinates."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.nvfp4 import abi, block, e4m3
from appliance.nvfp4.library import LibraryError

GROUPS = (16, 32, 64, 128)
SCALES = (np.uint8, np.float16, np.float32)


def _oracle(linear: Any) -> np.ndarray:
    scales = linear.scales
    values = e4m3.decode(scales) if scales.dtype == np.uint8 else scales.astype(np.float32)
    return block.dequantize(linear.codes, values, linear.row_globals, is_divisor=linear.is_divisor)


@pytest.mark.parametrize("n", [1, 7, 31, 33])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("scale_dtype", SCALES)
@pytest.mark.parametrize("is_divisor", [False, True])
def test_packed_weight_of_each_format_equals_the_oracle(
    n: int, group: int, scale_dtype: type, *, is_divisor: bool, on_host: Any, request: Any
) -> None:
    rng, make = request.getfixturevalue("rng"), request.getfixturevalue("linear_factory")
    linear = make(rng, n, 3 * group, group=group, scale_dtype=scale_dtype, is_divisor=is_divisor)

    values = on_host.dequantize(on_host.pack(linear))

    np.testing.assert_array_equal(values.view(np.uint32), _oracle(linear).view(np.uint32))


@settings(max_examples=60, deadline=None)
@given(
    n=st.one_of(st.sampled_from([1, 7, 31]), st.integers(1, 70)),
    blocks=st.integers(1, 9),
    group=st.sampled_from(GROUPS),
    scale_dtype=st.sampled_from(SCALES),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_weight_packed_in_any_parts_reads_back_in_any_parts(
    *,
    n: int,
    blocks: int,
    group: int,
    scale_dtype: type,
    seed: int,
    data: st.DataObject,
    on_host: Any,
    linear_factory: Any,
) -> None:
    rng = np.random.default_rng(seed)
    linear = linear_factory(rng, n, blocks * group, group=group, scale_dtype=scale_dtype)
    cuts = data.draw(st.lists(st.integers(0, n), max_size=4))
    edges = sorted({0, n, *cuts})
    packed = on_host.create(_desc(linear, n))
    report = abi.Report()
    on_host.library.report_reset(on_host.address(report))

    for begin, end in itertools.pairwise(edges):
        part = type(linear)(
            linear.codes[begin:end],
            linear.scales[begin:end],
            linear.row_globals[begin:end].copy(),
            is_divisor=False,
        )
        on_host.put(packed, part, row_begin=begin, report=on_host.address(report))
    first = data.draw(st.integers(0, n - 1))
    rows = data.draw(st.integers(1, n - first))
    values = on_host.dequantize(packed, row_begin=first, rows=rows)

    on_host.library.report_status(report, packed.handle)
    np.testing.assert_array_equal(values, _oracle(linear)[first : first + rows])


def test_weight_of_strided_sources_equals_the_oracle(
    rng: np.random.Generator, linear_factory: Any, on_host: Any
) -> None:
    whole = linear_factory(rng, 24, 128)
    # The second of two shards along K, rows 3 to 20: what tensor parallelism takes.
    shard = type(whole)(
        whole.codes[3:21, 32:], whole.scales[3:21, 4:], whole.row_globals[3:21].copy(), False
    )

    values = on_host.dequantize(on_host.pack(shard))

    np.testing.assert_array_equal(values, _oracle(whole)[3:21, 64:])


def test_fp16_output_is_the_rounded_fp32_output(
    rng: np.random.Generator, linear_factory: Any, on_host: Any
) -> None:
    linear = linear_factory(rng, 40, 256)
    linear.row_globals[:4] = [1e-9, 1e-4, 1.0, 60000.0]
    packed = on_host.pack(linear)

    halves = on_host.dequantize(packed, dtype=np.float16)

    with np.errstate(over="ignore"):
        expected = on_host.dequantize(packed).astype(np.float16)
    assert np.isinf(expected).any()
    assert (expected[expected != 0] < np.finfo(np.float16).tiny).any()
    np.testing.assert_array_equal(halves.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("scale_dtype", SCALES)
@pytest.mark.parametrize(
    ("value", "status"),
    [
        (np.nan, abi.Status.ESCALE_NAN),
        (-1.0, abi.Status.ESCALE_NEGATIVE),
        (-0.0, abi.Status.ESCALE_NEGATIVE),
    ],
)
def test_bad_scales_are_counted_and_the_first_is_named(
    scale_dtype: type, value: float, status: abi.Status, *, request: Any, on_host: Any
) -> None:
    rng, make = request.getfixturevalue("rng"), request.getfixturevalue("linear_factory")
    experts = [make(rng, 5, 64, scale_dtype=scale_dtype) for _ in range(3)]
    bad = e4m3.encode(np.array(value, np.float32)) if scale_dtype is np.uint8 else value
    experts[1].scales[3, 2] = bad
    experts[2].scales[0, 0] = bad

    with pytest.raises(LibraryError) as refused:
        on_host.pack(*experts)

    assert refused.value.status == status
    assert "2 block scales" in str(refused.value)
    assert "expert 1, row 3, block 2 (columns from 32)" in str(refused.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_bad_globals_are_counted_and_the_first_is_named(
    value: float, rng: np.random.Generator, linear_factory: Any, on_host: Any
) -> None:
    linear = linear_factory(rng, 9, 32)
    linear.row_globals[[4, 8]] = value

    with pytest.raises(LibraryError, match=r"2 globals .* row 4") as refused:
        on_host.pack(linear)

    assert refused.value.status == abi.Status.EGLOBAL


def test_zero_is_a_legal_multiplier_but_no_divisor(
    rng: np.random.Generator, linear_factory: Any, on_host: Any
) -> None:
    linear = linear_factory(rng, 2, 16)
    linear.row_globals[:] = 0
    divided = type(linear)(linear.codes, linear.scales, linear.row_globals, True)

    assert not on_host.dequantize(on_host.pack(linear)).any()
    with pytest.raises(LibraryError, match="EGLOBAL"):
        on_host.pack(divided)


def test_report_that_was_never_reset_is_refused(
    rng: np.random.Generator, linear_factory: Any, on_host: Any
) -> None:
    linear = linear_factory(rng, 2, 16)
    packed = on_host.pack(linear)

    with pytest.raises(LibraryError, match="EREPORT"):
        on_host.put(packed, linear, report=on_host.address(abi.Report()))
    with pytest.raises(LibraryError, match="EREPORT"):
        on_host.library.report_status(abi.Report(), packed.handle)


def test_handle_is_refused_after_any_change_to_it(
    rng: np.random.Generator, linear_factory: Any, on_host: Any
) -> None:
    packed = on_host.pack(linear_factory(rng, 2, 16))
    original = bytes(packed.handle)

    for offset in range(len(original)):
        changed = bytearray(original)
        changed[offset] ^= 0x10
        with pytest.raises(LibraryError) as refused:
            on_host.library.weight_check(abi.Weight.from_buffer(changed))
        assert refused.value.status in (abi.Status.EHANDLE, abi.Status.EVERSION)


def _desc(linear: Any, n: int) -> abi.WeightDesc:
    types = {np.uint8: abi.Type.E4M3, np.float16: abi.Type.F16, np.float32: abi.Type.F32}
    return abi.WeightDesc(
        kind=abi.WeightKind.LINEAR,
        experts=1,
        n=n,
        k=linear.k,
        group=linear.group,
        scale_type=types[linear.scales.dtype.type],
        global_kind=abi.GlobalKind.MULTIPLIER,
    )
