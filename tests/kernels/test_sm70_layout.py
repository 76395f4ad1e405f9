"""The packed layout and the shared-memory addresses, replayed on the host from the source."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

SOURCE = """
#include "layout/operand.h"
using namespace nvfp4;
extern "C" {
int column_of_lane(int lane) { return ColumnOfLane(lane); }
int lane_of_column(int column) { return LaneOfColumn(column); }
int row_of_lane(int lane) { return RowOfLane(lane); }
int accumulator_row(int lane, int i) { return AccumulatorRow(lane, i); }
int accumulator_column(int lane, int i) { return AccumulatorColumn(lane, i); }
int code_word(int lane, int k) { return CodeWord(lane, k); }
unsigned place_code(unsigned code, int k) { return PlaceCode(code, k); }
unsigned fetch_code(unsigned word, int k) { return FetchCode(word, k); }
unsigned e5m3(unsigned code) { return E5m3FromE4m3(code); }
int tile_row_of_lane(int lane) { return TileRowOfLane(lane); }
int tile_column_of_lane(int lane) { return TileColumnOfLane(lane); }
int tile_rows_at(int lane) { return TileRowsAt(lane); }
int tile_columns_at(int lane) { return TileColumnsAt(lane); }
int tile_sum_row(int lane, int i) { return TileSumRow(lane, i); }
int tile_sum_column(int lane, int i) { return TileSumColumn(lane, i); }
int operand_offset(int row, int column, int width) { return OperandOffset(row, column, width); }
long physical(long row, long n, int gate_up) { return PhysicalRow(row, n, gate_up); }
long logical(long row, long n, int gate_up) { return LogicalRow(row, n, gate_up); }
long padded(long n, int gate_up) { return PaddedRows(n, gate_up); }
}
"""
SLAB_PITCH, WIDE_PITCH = 144, 80


@pytest.fixture(scope="module")
def layout(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("layout")
    (folder / "maps.cpp").write_text(SOURCE)
    command = ("g++", "-std=c++17", "-shared", "-fPIC", "-I", repository / "kernels" / "src")
    subprocess.run((*command, folder / "maps.cpp", "-o", folder / "maps.so"), check=True)
    maps = ctypes.CDLL(str(folder / "maps.so"))
    for name in ("physical", "logical"):
        getattr(maps, name).argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_int)
        getattr(maps, name).restype = ctypes.c_long
    maps.padded.argtypes = (ctypes.c_long, ctypes.c_int)
    maps.padded.restype = ctypes.c_long
    for name in ("place_code", "fetch_code", "e5m3"):
        getattr(maps, name).restype = ctypes.c_uint
    return maps


def test_columns_of_lanes_are_a_bijection(layout: ctypes.CDLL) -> None:
    columns = [layout.column_of_lane(lane) for lane in range(32)]

    assert sorted(columns) == list(range(32))
    assert [layout.lane_of_column(column) for column in columns] == list(range(32))


def test_accumulators_cover_a_tile_once(layout: ctypes.CDLL) -> None:
    places = {
        (layout.accumulator_row(lane, i), layout.accumulator_column(lane, i))
        for lane in range(32)
        for i in range(8)
    }

    assert places == {(row, column) for row in range(8) for column in range(32)}


def test_codes_of_a_tile_fill_every_bit_once(layout: ctypes.CDLL) -> None:
    words: dict[int, int] = {}
    for lane in range(32):
        for k in range(64):
            bits = layout.place_code(15, k)
            word = layout.code_word(lane, k)
            assert words.get(word, 0) & bits == 0
            words[word] = words.get(word, 0) | bits

    assert words == dict.fromkeys(range(256), 0xFFFFFFFF)


def test_every_code_comes_back_from_every_place(layout: ctypes.CDLL) -> None:
    for k in range(64):
        for code in range(16):
            assert layout.fetch_code(layout.place_code(code, k), k) == code


def test_every_scale_code_is_exact_as_e5m3(layout: ctypes.CDLL) -> None:
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        value = mantissa * 2.0**-9 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
        byte = layout.e5m3(code)
        half_exponent, half_mantissa = byte >> 3, byte & 7
        found = 2.0 ** (half_exponent - 15) * (1 + half_mantissa / 8) if byte else 0.0
        assert found == value * 128


@pytest.mark.parametrize("gate_up", [0, 1])
@pytest.mark.parametrize("n", [2, 30, 64, 66, 96, 1536, 4120])
def test_rows_are_placed_once_and_come_back(layout: ctypes.CDLL, n: int, gate_up: int) -> None:
    places = [layout.physical(row, n, gate_up) for row in range(n)]

    assert len(set(places)) == n
    assert max(places) < layout.padded(n, gate_up)
    assert layout.padded(n, gate_up) % 64 == 0
    assert [layout.logical(place, n, gate_up) for place in places] == list(range(n))


def _banks_of(addresses: list[int], size: int) -> list[int]:
    """How often the busiest bank is used, for each group of lanes served at once."""
    lanes = 32 * 4 // size
    busiest = []
    for first in range(0, 32, lanes):
        words = {
            address // 4 + i
            for address in addresses[first : first + lanes]
            for i in range(size // 4)
        }
        counts = [sum(1 for word in words if word % 32 == bank) for bank in range(32)]
        busiest.append(max(counts))
    return busiest


@pytest.mark.parametrize("pitch", [SLAB_PITCH, WIDE_PITCH])
def test_reads_of_token_rows_have_no_bank_conflict(layout: ctypes.CDLL, pitch: int) -> None:
    for offset in range(0, pitch - 16, 16):
        addresses = [layout.row_of_lane(lane) * pitch + offset for lane in range(32)]

        assert _banks_of(addresses, 16) == [1, 1, 1, 1]


def test_writes_of_token_rows_have_no_bank_conflict() -> None:
    addresses = [(lane >> 3) * SLAB_PITCH + (lane & 7) * 16 for lane in range(32)]

    assert _banks_of(addresses, 16) == [1, 1, 1, 1]


def test_pitches_are_those_of_the_kernels(repository: Path) -> None:
    source = repository / "kernels" / "src"
    narrow = " ".join((source / "sm70_nvfp4_skinny.cuh").read_text().split())
    wide = " ".join((source / "sm70_nvfp4_skinny_wide.cuh").read_text().split())

    assert f"kSlabPitch = {SLAB_PITCH};" in narrow
    assert f"kWidePitch = {WIDE_PITCH};" in wide


def _holder(layout: ctypes.CDLL, lane: int, index: int) -> int:
    """The lane of this lane's quadpair that holds row (or column) `index` of an 8x8x4 product."""
    quadpair = (lane >> 2) & 3
    (found,) = (
        each
        for each in range(32)
        if (each >> 2) & 3 == quadpair and layout.row_of_lane(each) == index
    )
    return found


def test_sums_of_a_tile_lie_where_its_operands_came_from(layout: ctypes.CDLL) -> None:
    places = set()
    for lane in range(32):
        for i in range(8):
            row, column = layout.tile_sum_row(lane, i), layout.tile_sum_column(lane, i)
            places.add((row, column))
            of_row = _holder(layout, lane, layout.accumulator_row(lane, i))
            of_column = _holder(layout, lane, layout.accumulator_column(lane, i) % 8)
            assert row == layout.tile_row_of_lane(of_row)
            assert column == layout.tile_column_of_lane(of_column)

    assert places == {(row, column) for row in range(16) for column in range(16)}


def test_strided_operands_of_a_tile_are_its_rows_and_columns(layout: ctypes.CDLL) -> None:
    for lane in range(32):
        for element in range(4):
            holder = _holder(layout, lane, 4 * (lane >> 4) + element)
            assert layout.tile_rows_at(lane) + element == layout.tile_row_of_lane(holder)
            assert layout.tile_columns_at(lane) + element == layout.tile_column_of_lane(holder)


@pytest.mark.parametrize("width", [64, 128])
def test_operand_offsets_are_a_bijection_without_gaps_for_a_warp(
    width: int, layout: ctypes.CDLL
) -> None:
    offsets = [layout.operand_offset(row, k, width) for row in range(64) for k in range(width)]

    assert sorted(offsets) == list(range(64 * width))
    for first in range(0, width, 8):
        pieces = {layout.operand_offset(16 + row, first, width) for row in range(16)}
        assert sorted(pieces) == list(range(min(pieces), min(pieces) + 128, 8))


def _conflicts(addresses: list[int], words: int) -> int:
    """Accesses of one bank beyond the first, of different words; addresses in halves."""
    banks: dict[int, set[int]] = {}
    for address in set(addresses):
        for word in range(address // 2, address // 2 + words):
            banks.setdefault(word % 32, set()).add(word)
    return max(map(len, banks.values())) - 1


@pytest.mark.parametrize("pitch", [72, 136])
def test_contiguous_operands_of_a_tile_have_no_bank_conflict(
    pitch: int, layout: ctypes.CDLL
) -> None:
    for name in ("tile_row_of_lane", "tile_column_of_lane"):
        for first in range(0, 32, 8):  # 16 bytes a lane: eight lanes at a time
            rows = [getattr(layout, name)(lane) * pitch for lane in range(first, first + 8)]
            assert _conflicts(rows, 4) == 0


@pytest.mark.parametrize("pitch", [40, 72, 136])
def test_strided_operands_of_a_tile_have_no_bank_conflict(pitch: int, layout: ctypes.CDLL) -> None:
    for name in ("tile_rows_at", "tile_columns_at"):
        for first in (0, 16):  # 8 bytes a lane: sixteen lanes at a time
            addresses = [
                (lane & 3) * pitch + getattr(layout, name)(lane)
                for lane in range(first, first + 16)
            ]
            assert _conflicts(addresses, 2) == 0
