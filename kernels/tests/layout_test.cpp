// The packed layout of the sm_70 library on the host: its maps are bijections, its codes and scales
// decode exactly, and a warp emulated lane by lane from the PTX ISA's own operand maps gives the
// reference library's product.
#include <cmath>
#include <set>
#include <vector>

#include "expect.h"
#include "layout/tile.h"
#include "numbers.h"
#include "nvfp4.h"
#include "self_test_problem.h"

namespace {

using namespace nvfp4;

// ---- operand maps as PTX ISA 7.8, "Matrix fragments for mma.m8n8k4 with .f16", states them

struct Place {
  int row;
  int column;
};

// Which of the four 8x8x4 products a lane takes part in: lanes 4 q .. 4 q + 3 and 16 more.
int Quadpair(int lane) { return lane % 16 / 4; }
// The row of A, and the column of B, of which a lane holds four k.
int OperandIndex(int lane) { return lane % 4 + (lane < 16 ? 0 : 4); }
// Where FP32 register i of a lane lies in the 8x8 result of its product.
Place ResultPlace(int lane, int i) {
  const int row = (lane & 1) + (i & 2);
  return {lane < 16 ? row : row + 4, (i & 4) + (lane & 2) + (i & 1)};
}

void LaneMapsFollowTheIsa() {
  std::set<int> columns;
  std::set<std::pair<int, int>> results;
  for (int lane = 0; lane < kLanes; ++lane) {
    EXPECT(ColumnOfLane(lane) == Quadpair(lane) * 8 + OperandIndex(lane));
    EXPECT(LaneOfColumn(ColumnOfLane(lane)) == lane);
    EXPECT(RowOfLane(lane) == OperandIndex(lane));
    columns.insert(ColumnOfLane(lane));
    for (int i = 0; i < 8; ++i) {
      EXPECT(AccumulatorRow(lane, i) == ResultPlace(lane, i).row);
      EXPECT(AccumulatorColumn(lane, i) == Quadpair(lane) * 8 + ResultPlace(lane, i).column);
      results.insert({AccumulatorRow(lane, i), AccumulatorColumn(lane, i)});
    }
  }
  EXPECT(columns.size() == 32 && *columns.begin() == 0 && *columns.rbegin() == 31);
  EXPECT(results.size() == 8 * 32);
}

// ---- one record

void EveryBitOfARecordHoldsOneCodeBit() {
  std::vector<uint32_t> used(kScaleOffset / 4, 0);
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int k = 0; k < kTileK; ++k) {
      const int word = CodeWord(lane, k);
      EXPECT(word >= 0 && word < kScaleOffset / 4);
      const uint32_t bits = PlaceCode(15, k);
      EXPECT((used[static_cast<size_t>(word)] & bits) == 0);
      used[static_cast<size_t>(word)] |= bits;
      for (uint32_t code = 0; code < 16; ++code) {
        EXPECT(FetchCode(PlaceCode(code, k), k) == code);
        EXPECT(FetchCode(~bits | PlaceCode(code, k), k) == code);
      }
    }
  }
  for (const uint32_t word : used) {
    EXPECT(word == 0xffffffffU);
  }
  EXPECT(kScaleOffset + kLanes * 4 == kRecordBytes);
}

// What two masks and two shifts make of a code in its word: the half of its value times 2^-14.
uint16_t DecodedHalf(uint32_t word, int k) {
  const uint32_t half = k % 2 == 0 ? word & 0xffffU : word >> 16;
  const int pair = k / 2 % 4;
  constexpr int kSignShift[4] = {0, 3, 1, 2};  // layout/tile.h: 15, 12, 14, 13
  return static_cast<uint16_t>(((half << kSignShift[pair]) & 0x8000U) |
                               ((half << (3 * pair)) & 0x0e00U));
}

void DecodedCodesAreTheirValues() {
  for (int k = 0; k < 8; ++k) {
    for (uint32_t code = 0; code < 16; ++code) {
      const uint32_t noise = ~PlaceCode(15, k) & 0xa5c33c5aU;
      const float value = HalfToFloat(DecodedHalf(PlaceCode(code, k) | noise, k));
      EXPECT(FloatBits(value * 0x1p14F) == FloatBits(kE2m1[code]));
    }
  }
}

void ScalesAndProductsAreExact() {
  for (uint32_t scale = 0; scale < 0x7f; ++scale) {
    const uint32_t byte = E5m3FromE4m3(scale);
    EXPECT(byte < 0xf8U);
    const float value = HalfToFloat(static_cast<uint16_t>(byte << 7));
    EXPECT(value == E4m3ToFloat(static_cast<uint8_t>(scale)) * 0x1p7F);
    for (const float code : kE2m1) {
      const float product = code * 0x1p-14F * value;
      EXPECT(HalfToFloat(FloatToHalf(product)) == product);
    }
  }
}

// ---- rows and records of a weight

void RowMapsAreBijections() {
  for (const int64_t n : {2, 14, 62, 64, 66, 1536, 8240}) {
    for (const bool gate_up : {false, true}) {
      const int64_t padded = PaddedRows(n, gate_up);
      EXPECT(padded >= n && padded % (2 * kTileN) == 0 && padded == TilesN(padded) * kTileN);
      std::set<int64_t> seen;
      for (int64_t row = 0; row < n; ++row) {
        const int64_t physical = PhysicalRow(row, n, gate_up);
        EXPECT(physical >= 0 && physical < padded);
        EXPECT(LogicalRow(physical, n, gate_up) == row);
        seen.insert(physical);
      }
      EXPECT(seen.size() == static_cast<size_t>(n));
      for (int64_t physical = 0; physical < padded; ++physical) {
        const int64_t row = LogicalRow(physical, n, gate_up);
        EXPECT((row >= 0 && row < n) == (seen.count(physical) == 1));
      }
    }
  }
}

void GateAndUpOfOneOutputAreInNeighbouringTiles() {
  constexpr int64_t kN = 208;
  for (int64_t row = 0; row < kN / 2; ++row) {
    const int64_t gate = PhysicalRow(row, kN, true);
    const int64_t up = PhysicalRow(row + kN / 2, kN, true);
    EXPECT(up == gate + kTileN && gate / kTileN % 2 == 0);
  }
}

void RecordsFillTheBufferOnce() {
  const int64_t tiles_n = TilesN(4120);
  const int64_t tiles_k = TilesK(1040);
  std::set<int64_t> offsets;
  for (int64_t tile_n = 0; tile_n < tiles_n; ++tile_n) {
    for (int64_t tile_k = 0; tile_k < tiles_k; ++tile_k) {
      const int64_t offset = RecordOffset(tile_n, tile_k, tiles_n);
      EXPECT(offset % kRecordBytes == 0 && offset < tiles_n * tiles_k * kRecordBytes);
      offsets.insert(offset);
    }
  }
  EXPECT(offsets.size() == static_cast<size_t>(tiles_n * tiles_k));
}

// ---- a warp, lane by lane

struct Record {
  std::vector<uint32_t> words = std::vector<uint32_t>(kRecordBytes / 4, 0);
};

// Tile (tile_n, tile_k) of a canonical E4M3 weight; what lies outside of [n, k] is zero.
Record PackTile(const SelfTestWeight& w, int64_t tile_n, int64_t tile_k) {
  Record record;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int64_t row = tile_n * kTileN + ColumnOfLane(lane);
    for (int k = 0; row < w.n && k < kTileK; ++k) {
      const int64_t column = tile_k * kTileK + k;
      if (column >= w.k) {
        break;
      }
      const uint8_t pair = w.codes[static_cast<size_t>(row * (w.k / 2) + column / 2)];
      const uint32_t code = column % 2 == 0 ? pair & 15U : static_cast<uint32_t>(pair) >> 4;
      record.words[static_cast<size_t>(CodeWord(lane, k))] |= PlaceCode(code, k);
      if (k % 16 == 0) {
        const auto at = static_cast<size_t>(row * (w.k / w.group) + column / w.group);
        record.words[static_cast<size_t>(kScaleOffset / 4 + lane)] |= E5m3FromE4m3(w.scales[at])
                                                                      << (k / 2);
      }
    }
  }
  return record;
}

// The half that a lane feeds to the tensor core for its column and k: code * 2^-14 times scale *
// 2^7.
float OperandB(const Record& record, int lane, int k) {
  const uint32_t word = record.words[static_cast<size_t>(CodeWord(lane, k))];
  const uint32_t scales = record.words[static_cast<size_t>(kScaleOffset / 4 + lane)];
  const float scale = HalfToFloat(static_cast<uint16_t>(((scales >> (k / 16 * 8)) & 0xffU) << 7));
  return HalfToFloat(FloatToHalf(HalfToFloat(DecodedHalf(word, k)) * scale));
}

// x row `token` at k, zero outside of the matrix.
float OperandA(const std::vector<uint16_t>& x, int64_t m, int64_t k_size, int64_t token,
               int64_t k) {
  return token < m && k < k_size ? HalfToFloat(x[static_cast<size_t>(token * k_size + k)]) : 0.0F;
}

// One m8n8k4 of all lanes: each lane's registers from the operands of the lanes of its quadpair.
void Multiply(const float (&a)[kLanes][4], const float (&b)[kLanes][4], float (&acc)[kLanes][8]) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 8; ++i) {
      const Place at = ResultPlace(lane, i);
      for (int other_a = 0; other_a < kLanes; ++other_a) {
        for (int other_b = 0; other_b < kLanes; ++other_b) {
          const bool meets = Quadpair(other_a) == Quadpair(lane) &&
                             Quadpair(other_b) == Quadpair(lane) &&
                             OperandIndex(other_a) == at.row && OperandIndex(other_b) == at.column;
          for (int k = 0; meets && k < 4; ++k) {
            acc[lane][i] += a[other_a][k] * b[other_b][k];
          }
        }
      }
    }
  }
}

void MultiplyTile(const Record& record, const std::vector<uint16_t>& x, int64_t m, int64_t k_size,
                  int64_t tile_k, float (&acc)[kLanes][8]) {
  for (int k0 = 0; k0 < kTileK; k0 += 4) {
    float a[kLanes][4];
    float b[kLanes][4];
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int k = 0; k < 4; ++k) {
        a[lane][k] = OperandA(x, m, k_size, RowOfLane(lane), tile_k * kTileK + k0 + k);
        b[lane][k] = OperandB(record, lane, k0 + k);
      }
    }
    Multiply(a, b, acc);
  }
}

void EmulatedWarpGivesTheProduct(int64_t m, int64_t n, int64_t k_size) {
  const SelfTestProblem problem{m, n, k_size, 16, NVFP4_E4M3, NVFP4_GLOBAL_MULTIPLIER, 1, 1};
  const SelfTestWeight w = MakeSelfTestWeight(problem, n, k_size, 9);
  const std::vector<uint16_t> x = MakeSelfTestRows(m, k_size, 10);
  for (int64_t tile_n = 0; tile_n < TilesN(n); ++tile_n) {
    float acc[kLanes][8] = {};
    for (int64_t tile_k = 0; tile_k < TilesK(k_size); ++tile_k) {
      MultiplyTile(PackTile(w, tile_n, tile_k), x, m, k_size, tile_k, acc);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 8; ++i) {
        const int64_t token = AccumulatorRow(lane, i);
        const int64_t column = tile_n * kTileN + AccumulatorColumn(lane, i);
        if (token >= m || column >= n) {
          EXPECT(acc[lane][i] == 0.0F);  // the padding is zero
          continue;
        }
        const double y = static_cast<double>(acc[lane][i] * kEpilogueScale) * w.Factor(0, column);
        EXPECT(y == SelfTestProduct(w, 0, column, x, token));
      }
    }
  }
}

}  // namespace

int main() {
  LaneMapsFollowTheIsa();
  EveryBitOfARecordHoldsOneCodeBit();
  DecodedCodesAreTheirValues();
  ScalesAndProductsAreExact();
  RowMapsAreBijections();
  GateAndUpOfOneOutputAreInNeighbouringTiles();
  RecordsFillTheBufferOnce();
  EmulatedWarpGivesTheProduct(8, 64, 128);
  EmulatedWarpGivesTheProduct(3, 41, 80);
  EmulatedWarpGivesTheProduct(1, 1, 16);
  return nvfp4::test::Result();
}
