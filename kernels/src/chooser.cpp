#include "chooser.h"

#include <algorithm>

#include "layout/tile.h"
#include "nvfp4.h"

namespace nvfp4 {
namespace {

constexpr int64_t kTensorRows = 64, kTensorColumns = 256;

// K splits that fill `slots` CTAs from `units` of work, each split at least `least_steps` tiles of
// K deep.
int32_t Splits(int64_t units, int64_t slots, int64_t steps, int64_t least_steps) {
  const int64_t wanted = std::max<int64_t>(1, slots / std::max<int64_t>(1, units));
  return static_cast<int32_t>(std::max<int64_t>(1, std::min(wanted, steps / least_steps)));
}

// Up to 16 tokens, two CTAs of eight warps a multiprocessor: one column tile at a time, all warps
// on its K.
MatmulPlan Narrow(int64_t m, int64_t tiles_n, int64_t tiles_k) {
  MatmulPlan plan{NVFP4_KERNEL_SKINNY, m <= 8 ? 1 : 2, 1, 8, 0, 1, 1, 0};
  constexpr int64_t kSlots = 2 * kMultiprocessors;
  plan.column_groups = static_cast<int32_t>(std::min(tiles_n, kSlots));
  if (tiles_n * 2 <= kSlots) plan.split_k = Splits(tiles_n, kSlots, tiles_k, 16);
  return plan;
}

// 17 to 32 tokens, one CTA of eight warps a multiprocessor: two column groups of two tiles where
// there are enough, else one. Where whole blocks would leave a tenth of the device idle, CTAs take
// even shares of all steps instead.
MatmulPlan Wide(int64_t tiles_n, int64_t tiles_k) {
  const int64_t pairs = tiles_n / 2;
  const bool two_groups = pairs >= kMultiprocessors + kMultiprocessors / 2;
  MatmulPlan plan{NVFP4_KERNEL_SKINNY, 4, two_groups ? 4 : 2, 8, 0, 1, 1, 0};
  const int64_t blocks = two_groups ? CeilDiv(pairs, 2) : pairs, steps = 2 * tiles_k;
  const int64_t rounds = CeilDiv(blocks, kMultiprocessors);
  plan.column_groups = static_cast<int32_t>(std::min<int64_t>(pairs, kMultiprocessors));
  constexpr int64_t kLeastSpan = 16, kMostSteps = INT64_C(1) << 30;
  if (blocks * 10 >= rounds * kMultiprocessors * 9 || steps < kLeastSpan ||
      blocks * steps > kMostSteps)
    return plan;
  plan.span = static_cast<int32_t>(std::max(kLeastSpan, CeilDiv(blocks * steps, kMultiprocessors)));
  plan.column_groups = static_cast<int32_t>(CeilDiv(blocks * steps, plan.span));
  return plan;
}

MatmulPlan Tensor(int64_t m, int64_t n, int64_t tiles_k, bool float_scale) {
  MatmulPlan plan{NVFP4_KERNEL_TENSOR, float_scale ? 4 : 8, 8, 4, 0, 0, 1, 0};
  plan.column_groups = static_cast<int32_t>(CeilDiv(n, kTensorColumns));
  plan.row_tiles = static_cast<int32_t>(CeilDiv(m, 8 * plan.m_tiles));
  const int64_t units = static_cast<int64_t>(plan.column_groups) * plan.row_tiles;
  plan.split_k = Splits(units, 2 * kMultiprocessors, tiles_k, 8);
  return plan;
}

}  // namespace

MatmulPlan ChooseMatmul(int64_t m, int64_t n, int64_t k, bool float_scale) {
  const int64_t tiles_n = TilesN(n), tiles_k = TilesK(k);
  if (m <= 16) return Narrow(m, tiles_n, tiles_k);
  if (m <= kSkinnyLimit) return Wide(tiles_n, tiles_k);
  return Tensor(m, n, tiles_k, float_scale);
}

int32_t SpanBlocks(const MatmulPlan& plan, int64_t n) {
  return static_cast<int32_t>(CeilDiv(TilesN(n), plan.n_tiles));
}

int64_t PartialBytes(const MatmulPlan& plan, int64_t m, int64_t n) {
  if (plan.span > 0) {  // two slots of all token rows a CTA
    return INT64_C(2) * plan.column_groups * plan.m_tiles * 8 * plan.n_tiles * kTileN *
           static_cast<int64_t>(sizeof(float));
  }
  return plan.split_k == 1 ? 0 : plan.split_k * m * n * static_cast<int64_t>(sizeof(float));
}

int64_t WorkspaceBytes(int64_t m_max, int64_t n, int64_t k, bool float_scale) {
  int64_t bytes = 0;
  // A plan changes at these m only, and its partial sums grow with m in between; past the last row
  // tile that still splits K nothing is needed.
  for (const int64_t limit : {INT64_C(8), INT64_C(16), kSkinnyLimit}) {
    const int64_t m = std::min(limit, m_max);
    bytes = std::max(bytes, PartialBytes(ChooseMatmul(m, n, k, float_scale), m, n));
  }
  for (int64_t m = kSkinnyLimit; m < m_max;) {
    m = std::min(m_max, (m / 32 + 1) * 32);
    const MatmulPlan plan = ChooseMatmul(m, n, k, float_scale);
    if (plan.split_k == 1) break;
    bytes = std::max(bytes, PartialBytes(plan, m, n));
  }
  return bytes;
}

int64_t SliceRows(int64_t n, int64_t k) {
  const int64_t rows = NVFP4_WORKSPACE_LIMIT_BYTES / (2 * k);
  return std::min(n, std::max<int64_t>(64, rows / 64 * 64));
}

int32_t GroupedTileRows(int64_t pairs, int64_t experts) {
  // The average expert must fill about half of a tile; else most of the tile's products are
  // padding.
  if (pairs <= 6 * experts) return 8;
  if (pairs <= 12 * experts) return 16;
  if (pairs <= 24 * experts) return 32;
  return kTensorRows;
}

int64_t GroupedTileLimit(int64_t pairs, int64_t experts, int32_t tile_rows) {
  return std::min(pairs, experts + pairs / tile_rows);
}

MatmulPlan ChooseGrouped(int64_t pairs, int64_t experts, int64_t n, int64_t k, bool gate_up,
                         bool float_scale) {
  const int32_t rows = GroupedTileRows(pairs, experts);
  const int64_t tiles_n = PaddedRows(n, gate_up) / kTileN;
  MatmulPlan plan{};
  plan.split_k = 1;
  plan.row_tiles = static_cast<int32_t>(GroupedTileLimit(pairs, experts, rows));
  if (rows == kTensorRows) {
    plan.kernel = NVFP4_KERNEL_GROUPED_TENSOR;
    plan.m_tiles = float_scale ? 4 : 8;
    plan.n_tiles = 8;
    plan.warps = 4;
    plan.column_groups = static_cast<int32_t>(CeilDiv(tiles_n, plan.n_tiles));
    if (float_scale)
      plan.row_tiles = static_cast<int32_t>(GroupedTileLimit(pairs, experts, rows) * 2);
    return plan;
  }
  plan.kernel = NVFP4_KERNEL_GROUPED_SKINNY;
  plan.m_tiles = rows / 8;
  plan.n_tiles = 2;
  // Warps over K. With few rows an expert the CTAs are many and short: four a multiprocessor hide
  // each other's first loads.
  plan.warps = rows > 8 && TilesK(k) >= 16 ? 8 : 4;
  plan.column_groups = static_cast<int32_t>(tiles_n / 2);
  return plan;
}

}  // namespace nvfp4
