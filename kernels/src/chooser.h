// Which kernel runs, with how many CTAs and K splits: a closed form of the problem, no tables, no
// environment. Pure host code; the same answer on every machine.
#pragma once
#include <cstdint>

namespace nvfp4 {

constexpr int kMultiprocessors = 80;  // of a V100
constexpr int64_t kSkinnyLimit = 32;  // tokens the skinny kernels take
// Tokens above which dequantizing a slice and a plain FP16 GEMM may win. docs/kernels.md has the
// simulated times behind it.
constexpr int64_t kBreakEven = 1024;

struct MatmulPlan {
  int32_t kernel;   // nvfp4_kernel: skinny or tensor
  int32_t m_tiles;  // 8-token tiles of one CTA: 1, 2, 4 (skinny), 8 (tensor; 4 with float scales)
  int32_t n_tiles;  // 32-column tiles of one CTA at a time
  int32_t warps;
  int32_t column_groups;  // skinny: CTAs side by side; tensor: column blocks
  int32_t row_tiles;      // CTAs over M
  int32_t split_k;
  int32_t
      span;  // > 0: CTAs take even shares of (block, half step), this many each; parts are fixed up
};

// A dense product. float_scale: scales are FP32 words (groups of 64 and 128 with FP16 or FP32
// scales).
MatmulPlan ChooseMatmul(int64_t m, int64_t n, int64_t k, bool float_scale);
// Column blocks of a plan with a span.
int32_t SpanBlocks(const MatmulPlan& plan, int64_t n);
// Bytes of partial sums of that plan.
int64_t PartialBytes(const MatmulPlan& plan, int64_t m, int64_t n);
// The most PartialBytes of any batch of 1 .. m_max rows.
int64_t WorkspaceBytes(int64_t m_max, int64_t n, int64_t k, bool float_scale);
// Rows of the weight that one dequantized FP16 slice may hold.
int64_t SliceRows(int64_t n, int64_t k);

// A grouped product: tokens of one row tile.
int32_t GroupedTileRows(int64_t pairs, int64_t experts);
// The most row tiles that `pairs` pairs of `experts` experts can make.
int64_t GroupedTileLimit(int64_t pairs, int64_t experts, int32_t tile_rows);
MatmulPlan ChooseGrouped(int64_t pairs, int64_t experts, int64_t n, int64_t k, bool gate_up,
                         bool float_scale);

}  // namespace nvfp4
