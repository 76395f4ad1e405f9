// Tensor-core NVFP4 GEMM with in-register dequantization, for more than 32 tokens.
//
// Idea   A CTA computes 8*MT tokens x 32*NT*WN columns. A warp owns its columns, so a weight is
// decoded once a CTA; the
//        weights go global -> registers in fragment order, one step ahead. Only the token tile is
//        shared: two buffers, one barrier a step of 32 k. Row tiles are the fast grid axis, so that
//        the CTAs that need the same weights run together and find them in L2.
// Limit  the tensor pipe: per step and warp 8*MT*NT products against about 130 other instructions.
#pragma once
#include "sm70_nvfp4_skinny_wide.cuh"

namespace nvfp4 {

template <int MT>
constexpr int TensorSharedBytes() {
  return 2 * 8 * MT * kWidePitch;
}

// One finished accumulator pair of a lane.
template <Mode kMode>
__device__ __forceinline__ void StoreTensor(const MatmulArgs& p, const CtaRows& rows,
                                            const float* globals, int m_first, int row,
                                            int64_t column, float sum, float up, int split) {
  if (row >= rows.count || column >= (kMode == Mode::kGateUp ? p.n / 2 : p.n)) return;
  if (kMode == Mode::kDense) {
    if (p.partial) {
      p.partial[(static_cast<int64_t>(split) * p.m + m_first + row) * p.n + column] = sum;
    } else {
      StoreFinal(p, m_first + row, column, sum);
    }
  } else if (kMode == Mode::kDown) {
    p.partial[static_cast<int64_t>(rows.pairs[row]) * p.n + column] =
        ApplyGlobal(p, globals[column], sum);
  } else {
    const float* pair = globals + column / 32 * 64 + column % 32;
    const float gate = ApplyGlobal(p, pair[0], sum);
    p.y[static_cast<int64_t>(rows.pairs[row]) * p.ldy + column] =
        __float2half_rn(Silu(gate) * ApplyGlobal(p, pair[32], up));
  }
}

template <int MT, int NT, int WN, bool kFloatScale, Mode kMode>
__global__ void __launch_bounds__(WN * 32, 2) TensorKernel(const MatmulArgs p) {
  static_assert(kMode != Mode::kGateUp || NT == 2, "gate and up are the two tiles of a warp");
  constexpr int kRows = 8 * MT, kLoads = kRows * 4 / (WN * 32), kBuffer = kRows * kWidePitch;
  extern __shared__ __align__(16) char shared[];
  // A grouped row tile has 64 rows; kernels of 32 rows take two CTAs for one.
  constexpr int kShare = kMode == Mode::kDense ? 1 : 64 / kRows;
  if (kMode == Mode::kGateUp && blockIdx.x == 0) {
    constexpr int64_t kOut = 16 * NT * WN;
    ZeroSkipped(p, blockIdx.y * kOut, (blockIdx.y + 1) * kOut);
  }
  CtaRows rows = RowsOfTile<kMode>(p, blockIdx.x / kShare, kMode == Mode::kDense ? kRows : 64);
  const int skip = blockIdx.x % kShare * kRows;
  rows.count = min(rows.count - skip, kRows);
  if (rows.count <= 0) return;
  if (kMode != Mode::kDense) rows.pairs += skip;
  const int m_first = kMode == Mode::kDense ? blockIdx.x * kRows : 0;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

  const int tiles_k = static_cast<int>(p.tiles_k), tiles_n = static_cast<int>(p.tiles_n);
  const int splits = kMode == Mode::kDense ? gridDim.z : 1,
            split = kMode == Mode::kDense ? blockIdx.z : 0;
  const int first = 2 * static_cast<int>(static_cast<int64_t>(tiles_k) * split / splits);
  const int last = 2 * static_cast<int>(static_cast<int64_t>(tiles_k) * (split + 1) / splits);

  // Token rows: four threads a row, 16 bytes each.
  uint32_t x_offset[kLoads];
  uint4 x[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    x_offset[i] = static_cast<uint32_t>(
        (m_first + SourceRow<kMode>(rows, threadIdx.x / 4 + i * (WN * 8))) * (p.ldx >> 3));
  char* tile_st = shared + (threadIdx.x / 4) * kWidePitch + (lane & 3) * 16;
  const char* tile_ld = shared + RowOfLane(lane) * kWidePitch;
  const auto last_piece = static_cast<uint32_t>(p.k / 8 - 1);
  const auto load_x = [&](int s) {
    // Past K the weights are zero: any finite token does, and the row has no others.
    const uint32_t piece = min(s * 4u + (lane & 3), last_piece);
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      x[i] = __ldg(reinterpret_cast<const uint4*>(p.x) + (x_offset[i] + piece));
  };
  const auto store_x = [&](int buffer) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      *reinterpret_cast<uint4*>(tile_st + buffer * kBuffer + i * (WN * 8) * kWidePitch) = x[i];
  };

  // A warp past the last tile decodes the last pair again and stores nothing.
  const int tile = blockIdx.y * (NT * WN) + warp * NT, tile_ok = min(tile, tiles_n - NT);
  const char* packed = p.packed + rows.expert * p.moe.packed_stride + lane * 16;
  uint4 codes[NT];
  uint32_t scale_words[NT];
  const auto load_w = [&](int s) {
    const int at = min(s, last - 1), half = at & 1;
    const auto index = static_cast<uint32_t>(at >> 1) * static_cast<uint32_t>(tiles_n) + tile_ok;
    const char* record = packed + static_cast<uint64_t>(index) * kRecordBytes;
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      codes[t] = LoadCached128(record + t * kRecordBytes + half * kHalfBytes);
      const char* scale = record + t * kRecordBytes + kScaleOffset - lane * 12;
      scale_words[t] = kFloatScale ? LoadStream32(scale) : LoadStream16(scale + half * 2);
    }
  };

  float acc[MT][NT][8];
  Clear(acc);
  load_w(first);
  load_x(first);
  store_x(0);
  load_x(first + 1);
#pragma unroll 1
  for (int s = first; s < last; ++s) {
    const int buffer = (s - first) & 1;
    __syncthreads();  // tile s is whole, and nobody reads the other buffer any more
    store_x(buffer ^ 1);
    load_x(s + 2);
    uint4 now[NT];
    uint32_t now_scales[NT];
    ScalePair scales[NT];
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      now[t] = codes[t];
      now_scales[t] = scale_words[t];
      scales[t] = DecodeScales(scale_words[t]);
    }
    load_w(s + 1);
    const char* slab = tile_ld + buffer * kBuffer;
    float sum[MT][NT][8];
    if (kFloatScale) Clear(sum);
    float (&into)[MT][NT][8] = kFloatScale ? sum : acc;
    MultiplyStep<MT, NT, kFloatScale>(into, now, scales, slab);
    if (kFloatScale) AddScaled(acc, sum, now_scales, lane);
  }

  if (tile >= tiles_n) return;
  const float* globals = p.globals + rows.expert * p.moe.globals_stride;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = m * 8 + AccumulatorRow(lane, i), column_in = AccumulatorColumn(lane, i);
      if (kMode == Mode::kGateUp) {
        StoreTensor<kMode>(p, rows, globals, m_first, row,
                           static_cast<int64_t>(tile) * 16 + column_in, acc[m][0][i],
                           acc[m][NT - 1][i], split);
      } else {
#pragma unroll
        for (int t = 0; t < NT; ++t)
          StoreTensor<kMode>(p, rows, globals, m_first, row,
                             static_cast<int64_t>(tile + t) * 32 + column_in, acc[m][t][i], 0.0f,
                             split);
      }
    }
}

}  // namespace nvfp4
