// A 16 x 16 tile of a product by one mma.m8n8k4 a step: the four quadpairs take a quarter each.
//
// Quadpair q owns rows 4 (q & 1) + {0..3, 8..11} and columns 4 (q >> 1) + {0..3, 8..11}. With that
// order eight lanes that read 16 bytes each of a row-major operand touch eight different rows, so a
// pitch of 4 words (mod 32) has no bank conflict.
#pragma once
#include "tile.h"

namespace nvfp4 {

// Operands that lie k-contiguous: the row of A, the column of B that a lane loads.
NVFP4_HD constexpr int TileRowOfLane(int lane) {
  return (lane & 3) + 4 * ((lane >> 2) & 1) + 8 * (lane >> 4);
}
NVFP4_HD constexpr int TileColumnOfLane(int lane) {
  return (lane & 3) + 4 * ((lane >> 3) & 1) + 8 * (lane >> 4);
}
// Operands that lie k-strided: a lane loads four neighbours from here at k + (lane & 3).
NVFP4_HD constexpr int TileRowsAt(int lane) { return 4 * ((lane >> 2) & 1) + 8 * (lane >> 4); }
NVFP4_HD constexpr int TileColumnsAt(int lane) { return 4 * ((lane >> 3) & 1) + 8 * (lane >> 4); }
// Register i of the sums.
NVFP4_HD constexpr int TileSumRow(int lane, int i) {
  return ((i & 2) | (lane & 1)) + 4 * ((lane >> 2) & 1) + 8 * (lane >> 4);
}
NVFP4_HD constexpr int TileSumColumn(int lane, int i) {
  return ((i & 1) | (lane & 2)) + 4 * ((lane >> 3) & 1) + 8 * (i >> 2);
}

// Element (row, column) of a matrix with `width` columns that lies in tiles of 16 rows by 8
// columns, a tile's rows one after the other: what a warp loads as operand has no gaps.
NVFP4_HD constexpr int OperandOffset(int row, int column, int width) {
  return ((row / 16) * (width / 8) + column / 8) * 128 + row % 16 * 8 + column % 8;
}

}  // namespace nvfp4
