// Skinny NVFP4 matmul for 1..32 tokens: y[M, N] = x[M, K] . W[N, K]^T, every packed weight read
// once.
//
// Idea       A CTA owns 32*NT columns; its WK warps walk the K steps (64 k, one record a tile)
// round robin, so the
//            CTA streams one contiguous run of records. Weights go global -> registers in fragment
//            order; the 8*MT token rows of a step pass through a slab of shared memory that belongs
//            to one warp, so the loop has no barrier, only warp synchronisation.
// Exactness  code * 2^-14 times E5M3 scale * 2^7 is exact in FP16; HMMA.884 accumulates in FP32;
// the column's FP32
//            global meets the FP32 sum in the epilogue.
// Order      a CTA walks K in a circle from a step that its number gives (TurnOf); warps are
// summed 0..WK-1, K splits 0..S-1: the result depends on (M, N, K) only.
// Limit      weight bytes / read bandwidth; see docs/kernels.md for registers, occupancy and
// instruction counts.
#pragma once
#include "chooser.h"
#include "device/decode.cuh"
#include "device/mma_m8n8k4.cuh"
#include "matmul_args.h"

namespace nvfp4 {

constexpr int kSlabPitch =
    144;  // bytes a token row of 64 k: 36 words, so 8 rows x 16 bytes hit all 32 banks once

template <int MT, int NT, int WK>
constexpr int SkinnySharedBytes() {
  return WK * 8 * MT * kSlabPitch + WK * 8 * 32 * NT * 4 * (MT == 1 ? 2 : 1);
}

// One step's weights in flight.
template <int NT>
struct StepWeights {
  uint4 codes[NT][2];
  uint32_t scales[NT];
};

// Decode eight k of a column and feed both products; the group-128 kind multiplies by 2^14 (exact
// values).
template <int MT, int NT, int G, bool kFloatScale>
__device__ __forceinline__ void FeedWord(float (&acc)[MT][NT][8], const uint32_t (&words)[NT],
                                         const ScalePair (&scales)[NT], const char* slab_row,
                                         int slab_offset) {
  uint32_t b[NT][4];
#pragma unroll
  for (int t = 0; t < NT; ++t) {
    DecodeWord(words[t], b[t]);
    const uint32_t s = kFloatScale ? kHalf2Pow14 : BroadcastScale<G>(scales[t]);
#pragma unroll
    for (int i = 0; i < 4; ++i) b[t][i] = MulHalf2(b[t][i], s);
  }
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    const uint4 a = *reinterpret_cast<const uint4*>(slab_row + m * 8 * kSlabPitch + slab_offset);
#pragma unroll
    for (int t = 0; t < NT; ++t) MmaM8N8K4(acc[m][t], a.x, a.y, b[t][0], b[t][1]);
#pragma unroll
    for (int t = 0; t < NT; ++t) MmaM8N8K4(acc[m][t], a.z, a.w, b[t][2], b[t][3]);
  }
}

// The 32 k of half H of a step.
template <int MT, int NT, int H, bool kFloatScale>
__device__ __forceinline__ void FeedHalf(float (&acc)[MT][NT][8], const StepWeights<NT>& step,
                                         const ScalePair (&scales)[NT], const char* slab_row) {
  uint32_t w[NT];
#pragma unroll
  for (int t = 0; t < NT; ++t) w[t] = step.codes[t][H].x;
  FeedWord<MT, NT, 2 * H, kFloatScale>(acc, w, scales, slab_row, H * 64);
#pragma unroll
  for (int t = 0; t < NT; ++t) w[t] = step.codes[t][H].y;
  FeedWord<MT, NT, 2 * H, kFloatScale>(acc, w, scales, slab_row, H * 64 + 16);
#pragma unroll
  for (int t = 0; t < NT; ++t) w[t] = step.codes[t][H].z;
  FeedWord<MT, NT, 2 * H + 1, kFloatScale>(acc, w, scales, slab_row, H * 64 + 32);
#pragma unroll
  for (int t = 0; t < NT; ++t) w[t] = step.codes[t][H].w;
  FeedWord<MT, NT, 2 * H + 1, kFloatScale>(acc, w, scales, slab_row, H * 64 + 48);
}

template <int MT, int NT>
__device__ __forceinline__ void Clear(float (&acc)[MT][NT][8]) {
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[m][t][i] = 0.0f;
}

// acc += FP32 scale of each column * the sums of one step; a column's scale lives in the lane that
// owns the column.
template <int MT, int NT>
__device__ __forceinline__ void AddScaled(float (&acc)[MT][NT][8], const float (&step)[MT][NT][8],
                                          const uint32_t (&scales)[NT], int lane) {
#pragma unroll
  for (int t = 0; t < NT; ++t) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & 2) continue;  // registers i and i + 2 hold the same column
      const float scale = __uint_as_float(
          __shfl_sync(0xFFFFFFFFu, scales[t], LaneOfColumn(AccumulatorColumn(lane, i))));
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        acc[m][t][i] += scale * step[m][t][i];
        acc[m][t][i + 2] += scale * step[m][t][i + 2];
      }
    }
  }
}

// Element `e` of eight token rows, summed over the planes of the warps in order.
template <int WK, int kPlane>
__device__ __forceinline__ float SumPlanes(const float* sums, int e) {
  float sum = sums[e];
#pragma unroll
  for (int w = 1; w < WK; ++w) sum += sums[w * kPlane + e];
  return sum;
}

// What the epilogue multiplies and adds in the column of a thread. Loaded before the main loop,
// whose run hides the way to memory.
struct ColumnFactors {
  float global;  // of the column; of its gate column in a gate/up block
  float second;  // the up column's global, or the bias of a dense product
};
template <int kOut, Mode kMode>
__device__ __forceinline__ ColumnFactors LoadFactors(const MatmulArgs& p, int expert,
                                                     int first_tile) {
  const int column_in = threadIdx.x % kOut;
  const float* globals = p.globals + expert * p.moe.globals_stride;
  if (kMode == Mode::kGateUp) {  // gate tile, then its up tile
    const int64_t at = static_cast<int64_t>(first_tile) * 32 + column_in / 32 * 64 + column_in % 32;
    return {globals[at], globals[at + 32]};
  }
  // The last block may be wider than the weight.
  const int64_t column = min(static_cast<int64_t>(first_tile) * 32 + column_in, p.n - 1);
  const bool has_bias = kMode == Mode::kDense && p.bias != nullptr;
  return {globals[column], has_bias ? __half2float(p.bias[column]) : 0.0f};
}

// Where the sums of eight token rows of a column block go; CT column tiles, WK planes of partial
// sums. A thread keeps one column.
template <int CT, int WK, int kThreads, Mode kMode>
__device__ __forceinline__ void StoreBlock(const MatmulArgs& p, const CtaRows& rows,
                                           const ColumnFactors& factors, const float* sums,
                                           int first_tile, int last_tile, int m) {
  constexpr int kColumns = 32 * CT, kPlane = 8 * kColumns;
  constexpr int kOut = kMode == Mode::kGateUp ? kColumns / 2 : kColumns;
  static_assert(kThreads % kOut == 0, "a thread keeps its column");
  const auto total = [&](int e) { return SumPlanes<WK, kPlane>(sums, e); };
  const int column_in = threadIdx.x % kOut;
  const int tile = first_tile + column_in / 32 * (kMode == Mode::kGateUp ? 2 : 1);
  const int64_t column =
      static_cast<int64_t>(first_tile) * (kMode == Mode::kGateUp ? 16 : 32) + column_in;
  if (tile >= last_tile || column >= (kMode == Mode::kGateUp ? p.n / 2 : p.n)) return;
#pragma unroll
  for (int pass = 0; pass < (8 * kOut + kThreads - 1) / kThreads; ++pass) {
    const int in_tile = threadIdx.x / kOut + pass * (kThreads / kOut), row = m * 8 + in_tile;
    if (in_tile >= 8 || row >= rows.count) return;
    if (kMode == Mode::kDense) {
      StoreResult(p, row, column, total(in_tile * kColumns + column_in), factors.global,
                  factors.second);
    } else if (kMode == Mode::kDown) {
      p.partial[static_cast<int64_t>(rows.pairs[row]) * p.n + column] =
          ApplyGlobal(p, factors.global, total(in_tile * kColumns + column_in));
    } else {
      const int at = in_tile * kColumns + (column_in / 32) * 64 + column_in % 32;
      const float gate = ApplyGlobal(p, factors.global, total(at));
      const float up = ApplyGlobal(p, factors.second, total(at + 32));
      p.y[static_cast<int64_t>(rows.pairs[row]) * p.ldy + column] =
          __float2half_rn(Silu(gate) * up);
    }
  }
}

// Steps that a CTA starts ahead of the first one, of the `steps` that it walks in a circle. All
// CTAs read the same token rows: in step, every multiprocessor would ask the same slice of the
// second-level cache for the same piece at once. CTAs that share a multiprocessor keep one turn,
// and with it the rows in their L1; neighbours keep one too, and with it open pages of memory.
__device__ __forceinline__ int TurnOf(int cta, int steps) {
  constexpr int kTurns = 16;
  static_assert(kMultiprocessors % kTurns == 0, "even groups");
  return cta % kMultiprocessors / (kMultiprocessors / kTurns) * steps / kTurns;
}

template <int MT, int NT, int WK, int kMinBlocks, bool kFloatScale, Mode kMode>
__global__ void __launch_bounds__(WK * 32, kMinBlocks) SkinnyKernel(const MatmulArgs p) {
  static_assert(kMode != Mode::kGateUp || NT == 2, "gate and up are the two tiles of a block");
  extern __shared__ __align__(16) char shared[];
  constexpr int kSlab = 8 * MT * kSlabPitch;
  constexpr int kColumns = 32 * NT, kOut = kMode == Mode::kGateUp ? kColumns / 2 : kColumns;
  if (kMode == Mode::kGateUp && blockIdx.y == 0) {
    for (int64_t block = blockIdx.x; block * 32 < p.n / 2; block += gridDim.x)
      ZeroSkipped(p, block * 32, block * 32 + 32);
  }
  const CtaRows rows = RowsOfTile<kMode>(p, kMode == Mode::kDense ? 0 : blockIdx.y, 8 * MT);
  if (rows.count <= 0) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  char* slab_st = shared + warp * kSlab + (lane >> 3) * kSlabPitch + (lane & 7) * 16;
  const char* slab_ld = shared + warp * kSlab + RowOfLane(lane) * kSlabPitch;
  float* sums = reinterpret_cast<float*>(shared + WK * kSlab);

  // The K steps of this CTA: its split of a dense product, all of a grouped one.
  const int tiles_k = static_cast<int>(p.tiles_k);
  const int split = kMode == Mode::kDense ? blockIdx.y : 0,
            splits = kMode == Mode::kDense ? gridDim.y : 1;
  const Range k_range = splits == 1 ? Range{0, tiles_k} : ShareOf(tiles_k, split, splits);
  const int first = k_range.begin, steps = k_range.end - k_range.begin;
  const int blocks = static_cast<int>(p.tiles_n / NT);

  // In units of eight halves: ldx is a multiple of eight.
  uint32_t x_offset[2 * MT];
#pragma unroll
  for (int i = 0; i < 2 * MT; ++i)
    x_offset[i] =
        static_cast<uint32_t>(SourceRow<kMode>(rows, (lane >> 3) + 4 * i) * (p.ldx >> 3)) +
        8 * first;

  // The loads run one step ahead of the products, over the ends of column blocks: a cursor over the
  // flat sequence of (block, step), advanced by WK steps a time.
  int next_blocks = 0, next_steps = WK, load_step = warp, load_block = blockIdx.x;
  // Few steps: a stride of more than one block. Loops, since a division takes longer.
#pragma unroll 1
  for (; next_steps >= steps; next_steps -= steps) next_blocks += gridDim.x;
#pragma unroll 1
  for (; load_step >= steps; load_step -= steps) load_block += gridDim.x;
  const int turn = kMode == Mode::kDense ? TurnOf(blockIdx.x, steps) : 0;
  int load_at = load_step + turn;  // in the circle; minus `steps` past its end
  const char* codes_base = p.packed + rows.expert * p.moe.packed_stride +
                           static_cast<int64_t>(first) * p.tiles_n * kRecordBytes + lane * 16;
  const char* scales_base = codes_base + kScaleOffset - lane * 12;
  KeepInRegisters(codes_base);
  KeepInRegisters(scales_base);
  const auto last_piece = static_cast<uint32_t>(p.k / 8 - 1 - 8 * first);
  StepWeights<NT> step;
  uint4 x[2 * MT];
  const char *codes, *scale_words_at;
  uint32_t x_piece;
  const auto settle = [&] {
    const int block = min(load_block, blocks - 1);  // past the end: any legal address
    const int at = kMode == Mode::kDense && load_at >= steps ? load_at - steps : load_at;
    const auto tile = static_cast<uint32_t>(at) * static_cast<uint32_t>(p.tiles_n) + block * NT;
    codes = codes_base + static_cast<uint64_t>(tile) * kRecordBytes;
    scale_words_at = scales_base + static_cast<uint64_t>(tile) * kRecordBytes;
    // Past K the weights are zero: any finite token does, and the row has no others.
    x_piece = min(at * 8u + (lane & 7), last_piece);
    load_at += next_steps;
    load_block += next_blocks;
    if (load_at >= turn + steps) {
      load_at -= steps;
      load_block += gridDim.x;
    }
  };
  const auto load_codes = [&](int h) {
#pragma unroll
    for (int t = 0; t < NT; ++t)
      step.codes[t][h] = LoadStream128(codes + t * kRecordBytes + h * kHalfBytes);
  };
  const auto load_scales = [&] {
#pragma unroll
    for (int t = 0; t < NT; ++t) step.scales[t] = LoadStream32(scale_words_at + t * kRecordBytes);
  };
  const auto load_x = [&] {
#pragma unroll
    for (int i = 0; i < 2 * MT; ++i)
      x[i] = __ldg(reinterpret_cast<const uint4*>(p.x) + (x_offset[i] + x_piece));
  };

  settle();
  load_codes(0);
  load_codes(1);
  load_scales();
  load_x();
  int s = warp, parity = 0;
  for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
    const ColumnFactors factors = LoadFactors<kOut, kMode>(p, rows.expert, block * NT);
    float acc[MT][NT][8];
    Clear(acc);
#pragma unroll 1
    for (; s < steps; s += WK) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2 * MT; ++i)
        *reinterpret_cast<uint4*>(slab_st + i * 4 * kSlabPitch) = x[i];
      __syncwarp();
      ScalePair scales[NT];
      uint32_t scale_words[NT];
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        scale_words[t] = step.scales[t];
        scales[t] = DecodeScales(step.scales[t]);
      }
      settle();
      load_x();
      load_scales();
      if (kFloatScale) {
        float sum[MT][NT][8];
        Clear(sum);
        FeedHalf<MT, NT, 0, true>(sum, step, scales, slab_ld);
        load_codes(0);
        FeedHalf<MT, NT, 1, true>(sum, step, scales, slab_ld);
        load_codes(1);
        AddScaled(acc, sum, scale_words, lane);
      } else {
        FeedHalf<MT, NT, 0, false>(acc, step, scales, slab_ld);
        load_codes(0);
        FeedHalf<MT, NT, 1, false>(acc, step, scales, slab_ld);
        load_codes(1);
      }
    }
    s -= steps;

    // Sum the warps in order, eight token rows at a time. With one such tile two planes alternate:
    // the barrier of the next block also ends the reads of this one.
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      float* out = sums + parity * (WK * 8 * kColumns);
      if (MT == 1) {
        parity ^= 1;
      } else {
        __syncthreads();
      }
#pragma unroll
      for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          out[(warp * 8 + AccumulatorRow(lane, i)) * kColumns + t * 32 +
              AccumulatorColumn(lane, i)] = acc[m][t][i];
      __syncthreads();
      StoreBlock<NT, WK, WK * 32, kMode>(p, rows, factors, out, block * NT, block * NT + NT, m);
    }
  }
}

}  // namespace nvfp4
