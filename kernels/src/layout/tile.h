// The one packed weight layout of the sm_70 library: every kernel reads it, only the repack writes
// it.
//
// A weight [N, K] is cut into tiles of 32 output columns (rows of the checkpoint's [N, K] tensor)
// by 64 k. A tile is one record of 1152 bytes (4.5 bits a weight), in the order the tensor-core
// fragments want:
//
//   bytes    0..511   codes of k  0..31: 16 bytes for each of the 32 lanes
//   bytes  512..1023  codes of k 32..63: 16 bytes for each lane
//   bytes 1024..1151  scale word: 4 bytes for each lane
//
// A lane owns ONE column of the tile (see kColumnOfLane) and all its 64 k, so its two 128-bit loads
// and one 32-bit load are already its HMMA.884 B operand. Records run along N first: [Kpad /
// 64][Npad / 32][1152], so that CTAs that walk K side by side read one contiguous window of memory
// (DRAM pages stay open); with K first every CTA has a stream of its own. N is padded to 64
// columns, so that a pair of tiles always exists.
//
// Scale word, group 16 (and 32, 64, whose scales are repeated): four E5M3 bytes, byte g for k
// 16g..16g+15. Scale word, group 128: one FP32 scale for the 64 k of the tile.
#pragma once
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define NVFP4_HD __host__ __device__
#else
#define NVFP4_HD
#endif

namespace nvfp4 {

constexpr int kLayoutVersion = 1;
constexpr int kTileN = 32;
constexpr int kTileK = 64;
constexpr int kLanes = 32;
constexpr int kHalfBytes = 512;     // codes of 32 k of a tile
constexpr int kScaleOffset = 1024;  // where the scale words start in a record
constexpr int kRecordBytes = 1152;

NVFP4_HD constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
NVFP4_HD constexpr int64_t TilesN(int64_t n) { return CeilDiv(n, 2 * kTileN) * 2; }
NVFP4_HD constexpr int64_t TilesK(int64_t k) { return CeilDiv(k, kTileK); }

// Byte offset of the record of tile (tile_n, tile_k) in a tensor with tiles_n tiles along N.
NVFP4_HD constexpr int64_t RecordOffset(int64_t tile_n, int64_t tile_k, int64_t tiles_n) {
  return (tile_k * tiles_n + tile_n) * kRecordBytes;
}

// Physical row of a row of the checkpoint. A gate/up weight puts 32 gate rows and the 32 up rows
// that belong to them in adjacent tiles, so that one CTA holds both factors of silu(gate) * up.
NVFP4_HD constexpr int64_t PaddedRows(int64_t n, bool gate_up) {
  return gate_up ? 2 * CeilDiv(n / 2, kTileN) * kTileN : TilesN(n) * kTileN;
}
NVFP4_HD constexpr int64_t PhysicalRow(int64_t row, int64_t n, bool gate_up) {
  if (!gate_up) return row;
  const int64_t half = n / 2, is_up = row >= half ? 1 : 0, at = row - is_up * half;
  return (at / kTileN) * (2 * kTileN) + is_up * kTileN + at % kTileN;
}

// The inverse; a padding row of a gate/up weight gives -1, one of a linear weight a number >= n.
NVFP4_HD constexpr int64_t LogicalRow(int64_t physical, int64_t n, bool gate_up) {
  if (!gate_up) return physical;
  const int64_t at = physical / (2 * kTileN) * kTileN + physical % kTileN;
  return at >= n / 2 ? -1 : at + (physical / kTileN % 2) * (n / 2);
}

// HMMA.884 gives quadpair q = (lane >> 2) & 3 its own 8x8x4 product; in it a lane holds column
// (lane & 3) + 4 * (lane >= 16) of B. The four quadpairs take four adjacent groups of 8 columns.
NVFP4_HD constexpr int ColumnOfLane(int lane) {
  return ((lane >> 2) & 3) * 8 + (lane & 3) + ((lane >> 4) & 1) * 4;
}
NVFP4_HD constexpr int LaneOfColumn(int column) {
  return ((column >> 3) & 3) * 4 + (column & 3) + ((column >> 2) & 1) * 16;
}

// Row of A (token of an 8-token tile) a lane holds.
NVFP4_HD constexpr int RowOfLane(int lane) { return (lane & 3) + ((lane >> 4) & 1) * 4; }

// FP32 accumulator register i of a lane: its row (token) in the 8-token tile, its column in the
// 32-column tile.
NVFP4_HD constexpr int AccumulatorRow(int lane, int i) {
  return (i & 2) | ((lane >> 4) & 1) * 4 | (lane & 1);
}
NVFP4_HD constexpr int AccumulatorColumn(int lane, int i) {
  return ((lane >> 2) & 3) * 8 + ((i & 1) | (((lane >> 1) & 1) << 1) | ((i >> 2) << 2));
}

// Where the code of k (0..63) of a column lies: 32-bit word of the record, and its place inside the
// word. Eight consecutive k share a word; even k sit in the low, odd k in the high 16 bits, so that
// one mask yields the two codes of a half2. Inside a half the pairs 0..3 use four interleaved bit
// fields (sign, three magnitude bits):
//   pair 0: 15, 11:9   pair 1: 12, 8:6   pair 2: 14, 5:3   pair 3: 13, 2:0
// The magnitude bits moved to 11:9 read as the code's value times 2^-14 (half bias 15, E2M1 bias
// 1).
NVFP4_HD constexpr int CodeWord(int lane, int k) {
  return (k >> 5) * (kHalfBytes / 4) + lane * 4 + ((k >> 3) & 3);
}
NVFP4_HD constexpr int CodeSignBit(int k) {
  const int pair = (k >> 1) & 3;
  return (pair == 0 ? 15 : pair == 1 ? 12 : pair == 2 ? 14 : 13) + (k & 1) * 16;
}
NVFP4_HD constexpr int CodeMagnitudeShift(int k) { return 9 - 3 * ((k >> 1) & 3) + (k & 1) * 16; }

// Spread one E2M1 code (0..15) to its bits in its word.
NVFP4_HD constexpr uint32_t PlaceCode(uint32_t code, int k) {
  return ((code >> 3) & 1u) << CodeSignBit(k) | (code & 7u) << CodeMagnitudeShift(k);
}
NVFP4_HD constexpr uint32_t FetchCode(uint32_t word, int k) {
  return ((word >> CodeSignBit(k)) & 1u) << 3 | ((word >> CodeMagnitudeShift(k)) & 7u);
}

// E4M3 (bias 7) code 0x00..0x7E to E5M3 of value * 2^7: bits 14..7 of the half that holds value *
// 2^7. Exact for all 127 codes: normals move by bias 15 - 7 + 7, the seven subnormals m * 2^-9
// become normal.
NVFP4_HD constexpr uint32_t E5m3FromE4m3(uint32_t code) {
  const uint32_t exponent = code >> 3, mantissa = code & 7u;
  if (exponent) return (exponent + 15u) << 3 | mantissa;
  if (mantissa == 0) return 0;
  // m * 2^-9 * 2^7 = m * 2^-2: leading bit at 2, 1 or 0.
  const uint32_t top = mantissa >= 4 ? 2u : mantissa >= 2 ? 1u : 0u;
  return (top + 13u) << 3 | ((mantissa << (3u - top)) & 7u);
}
constexpr float kEpilogueScale = 128.0f;     // undoes the 2^-7 the weights carry into the HMMA
constexpr float kEpilogueScaleFloat = 1.0f;  // float scales feed exact codes

}  // namespace nvfp4
