// Skinny NVFP4 matmul with column groups side by side: 17..32 tokens, where the tensor cores and
// not the memory set the pace.
//
// Idea   As sm70_nvfp4_skinny.cuh, with three changes. A step is 32 k: the loop of 4 token tiles x
// 2 column tiles then
//        fits the 12 KB instruction cache of a sub-core. WN warps side by side read the same token
//        rows, so that all but the first find them in L1. Weights are one step ahead in registers
//        of their own. Code behind the loop is small: a launch pays for every line of it once.
// Order  as there; parts of a block are summed in the order of K.
#pragma once
#include "sm70_nvfp4_skinny.cuh"

namespace nvfp4 {

constexpr int kWidePitch =
    80;  // bytes a token row of 32 k: 20 words, so 8 rows x 16 bytes hit all 32 banks once

template <int MT, int NT, int WN, int WK>
constexpr int WideSharedBytes() {
  return WN * WK * 8 * MT * kWidePitch + WK * 8 * 32 * NT * WN * 4;
}

// Operand B of eight k: word W of the 32 k of a step.
template <int NT, int W, bool kFloatScale>
__device__ __forceinline__ void DecodeStepWord(uint32_t (&b)[NT][4], const uint4 (&codes)[NT],
                                               const ScalePair (&scales)[NT]) {
#pragma unroll
  for (int t = 0; t < NT; ++t) {
    DecodeWord(W == 0 ? codes[t].x : W == 1 ? codes[t].y : W == 2 ? codes[t].z : codes[t].w, b[t]);
    const uint32_t s = kFloatScale ? kHalf2Pow14 : BroadcastScale<W / 2>(scales[t]);
#pragma unroll
    for (int i = 0; i < 4; ++i) b[t][i] = MulHalf2(b[t][i], s);
  }
}

// All products of eight k.
template <int MT, int NT>
__device__ __forceinline__ void MultiplyWord(float (&acc)[MT][NT][8], const uint32_t (&b)[NT][4],
                                             const char* rows) {
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    const uint4 a = *reinterpret_cast<const uint4*>(rows + m * 8 * kWidePitch);
#pragma unroll
    for (int t = 0; t < NT; ++t) MmaM8N8K4(acc[m][t], a.x, a.y, b[t][0], b[t][1]);
#pragma unroll
    for (int t = 0; t < NT; ++t) MmaM8N8K4(acc[m][t], a.z, a.w, b[t][2], b[t][3]);
  }
}

// A step of 32 k.
template <int MT, int NT, bool kFloatScale>
__device__ __forceinline__ void MultiplyStep(float (&acc)[MT][NT][8], const uint4 (&codes)[NT],
                                             const ScalePair (&scales)[NT], const char* rows) {
  uint32_t b[NT][4];
  DecodeStepWord<NT, 0, kFloatScale>(b, codes, scales);
  MultiplyWord(acc, b, rows);
  DecodeStepWord<NT, 1, kFloatScale>(b, codes, scales);
  MultiplyWord(acc, b, rows + 16);
  DecodeStepWord<NT, 2, kFloatScale>(b, codes, scales);
  MultiplyWord(acc, b, rows + 32);
  DecodeStepWord<NT, 3, kFloatScale>(b, codes, scales);
  MultiplyWord(acc, b, rows + 48);
}

template <int MT, int NT, int WN, int WK, int kMinBlocks, bool kFloatScale, Mode kMode>
__global__ void __launch_bounds__(WN * WK * 32, kMinBlocks) SkinnyWideKernel(const MatmulArgs p) {
  static_assert(kMode != Mode::kGateUp || NT == 2, "gate and up are the two tiles of a warp");
  static_assert(WK % 2 == 0, "a warp keeps its half of a tile");
  extern __shared__ __align__(16) char shared[];
  constexpr int kSlab = 8 * MT * kWidePitch;
  constexpr int kColumns = 32 * NT * WN, kOut = kMode == Mode::kGateUp ? kColumns / 2 : kColumns;
  if (kMode == Mode::kGateUp && blockIdx.y == 0) {
    const int64_t pairs = p.tiles_n / 2;
    ZeroSkipped(p, pairs * blockIdx.x / gridDim.x * 32, pairs * (blockIdx.x + 1) / gridDim.x * 32);
  }
  const CtaRows rows = RowsOfTile<kMode>(p, kMode == Mode::kDense ? 0 : blockIdx.y, 8 * MT);
  if (rows.count <= 0) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int warp_n = warp / WK,
            warp_k = warp % WK;  // every sub-core gets a warp of each column group
  char* slab_st = shared + warp * kSlab + (lane >> 2) * kWidePitch + (lane & 3) * 16;
  const char* slab_ld = shared + warp * kSlab + RowOfLane(lane) * kWidePitch;
  float* sums = reinterpret_cast<float*>(shared + WN * WK * kSlab);

  // The work of this CTA: pieces, each a block of NT * WN column tiles over a run of half-tile
  // steps.
  //  whole  an even share of all column tiles over all of K. A warp without a tile in the last
  //  block skips it and
  //         leaves the tensor cores to the others.
  //  even   (p.parts set) an even share of the flat sequence of (block, step): the first and the
  //  last piece may be
  //         parts of a block; they go to slots of their own and FixUpKernel sums them.
  constexpr int kBlockTiles = NT * WN;
  const bool even = kMode == Mode::kDense && p.parts != nullptr;
  const int steps = 2 * static_cast<int>(p.tiles_k);
  const int tiles_n = static_cast<int>(p.tiles_n);
  int first_tile, last_tile, first_step = 0, last_step = steps;
  if (even) {
    const int all = (tiles_n + kBlockTiles - 1) / kBlockTiles * steps;
    const int begin = blockIdx.x * p.span, end = min(begin + p.span, all);
    if (begin >= all) return;
    first_tile = begin / steps * kBlockTiles;
    first_step = begin % steps;
    last_tile = (end + steps - 1) / steps * kBlockTiles;
    last_step = (end - 1) % steps + 1;
  } else {
    const Range groups = ShareOf(tiles_n / NT, blockIdx.x, gridDim.x);
    first_tile = groups.begin * NT;
    last_tile = groups.end * NT;
  }
  const auto end_of = [&](int block) {
    return block + kBlockTiles >= last_tile ? last_step : steps;
  };

  uint32_t x_offset[MT];  // in units of eight halves
#pragma unroll
  for (int i = 0; i < MT; ++i)
    x_offset[i] = static_cast<uint32_t>(SourceRow<kMode>(rows, (lane >> 2) + 8 * i) * (p.ldx >> 3));

  // The loads run one step ahead of the products: a cursor over the pieces, advanced by WK steps a
  // time.
  int next_tiles = 0, next_steps = WK, load_block = first_tile + warp_n * NT,
      load_step = first_step + warp_k;
  // Few steps: a stride of more than one block.
#pragma unroll 1
  for (; next_steps >= steps; next_steps -= steps) next_tiles += kBlockTiles;
#pragma unroll 1
  for (; load_step >= steps; load_step -= steps) load_block += kBlockTiles;
  // Even shares begin at different steps by themselves.
  const int turn = kMode == Mode::kDense && !even ? TurnOf(blockIdx.x, steps) : 0;
  const auto wrap = [&] {
    const int end = end_of(load_block);
    if (load_step >= end) {
      load_step -= end;
      load_block += kBlockTiles;
    }
  };
  wrap();
  const char* codes_base = p.packed + rows.expert * p.moe.packed_stride + lane * 16;
  const char* scales_base = codes_base + kScaleOffset - lane * 12;
  KeepInRegisters(codes_base);
  KeepInRegisters(scales_base);
  const auto last_piece = static_cast<uint32_t>(p.k / 8 - 1);
  uint4 codes[NT];
  uint32_t scale_words[NT];
  uint4 x[MT];
  const auto load = [&] {
    // Past the end of the work: any legal address.
    const int tile = min(load_block, tiles_n - NT);
    int at = load_step + turn;
    if (kMode == Mode::kDense && at >= steps) at -= steps;
    const int half = kMode == Mode::kDense ? at & 1 : warp_k & 1;  // all of K: WK is even
    const auto index = static_cast<uint32_t>(at >> 1) * static_cast<uint32_t>(tiles_n) + tile;
    const uint64_t record = static_cast<uint64_t>(index) * kRecordBytes;
    // Past K the weights are zero: any finite token does, and the row has no others.
    const uint32_t piece = min(at * 4u + (lane & 3), last_piece);
#pragma unroll
    for (int i = 0; i < MT; ++i)
      x[i] = __ldg(reinterpret_cast<const uint4*>(p.x) + (x_offset[i] + piece));
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      codes[t] = LoadStream128(codes_base + record + (t * kRecordBytes + half * kHalfBytes));
      const char* scale = scales_base + record + t * kRecordBytes;
      scale_words[t] = kFloatScale ? LoadStream32(scale) : LoadStream16(scale + half * 2);
    }
    load_step += next_steps;
    load_block += next_tiles;
    wrap();
  };

  load();
  int s = first_step + warp_k;
  for (int block = first_tile; block < last_tile; block += kBlockTiles) {
    const ColumnFactors factors = LoadFactors<kOut, kMode>(p, rows.expert, block);
    float acc[MT][NT][8];
    Clear(acc);
    const int piece_end = end_of(block), end = block + warp_n * NT < last_tile ? piece_end : 0;
#pragma unroll 1
    for (; s < end; s += WK) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < MT; ++i) *reinterpret_cast<uint4*>(slab_st + i * 8 * kWidePitch) = x[i];
      __syncwarp();
      uint4 now[NT];
      uint32_t now_scales[NT];
      ScalePair scales[NT];
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        now[t] = codes[t];
        now_scales[t] = scale_words[t];
        scales[t] = DecodeScales(scale_words[t]);
      }
      load();
      float sum[MT][NT][8];
      if (kFloatScale) Clear(sum);
      float (&into)[MT][NT][8] = kFloatScale ? sum : acc;
      MultiplyStep<MT, NT, kFloatScale>(into, now, scales, slab_ld);
      if (kFloatScale) AddScaled(acc, sum, now_scales, lane);
    }
    s -= end;

    const bool is_part =
        even && (block == first_tile ? first_step > 0 || piece_end < steps : piece_end < steps);
    // A loop over the token tiles that is not unrolled moves the sums down: its code must not drive
    // the main loop out of the instruction cache.
#pragma unroll 1
    for (int m = 0; m < MT; ++m) {
      __syncthreads();
#pragma unroll
      for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          sums[(warp_k * 8 + AccumulatorRow(lane, i)) * kColumns + (warp_n * NT + t) * 32 +
               AccumulatorColumn(lane, i)] = acc[0][t][i];
#pragma unroll
      for (int next = 1; next < MT; ++next)
#pragma unroll
        for (int t = 0; t < NT; ++t)
#pragma unroll
          for (int i = 0; i < 8; ++i) acc[next - 1][t][i] = acc[next][t][i];
      __syncthreads();
      if (is_part) {
        float* slot =
            p.parts + (2 * blockIdx.x + (block == first_tile ? 0 : 1)) * (8 * MT * kColumns);
        for (int e = threadIdx.x; e < 8 * kColumns; e += WN * WK * 32)
          slot[m * 8 * kColumns + e] = SumPlanes<WK, 8 * kColumns>(sums, e);
        continue;
      }
      StoreBlock<NT * WN, WK, WN * WK * 32, kMode>(p, rows, factors, sums, block,
                                                   min(last_tile, block + kBlockTiles), m);
    }
  }
}

// Finishes the blocks that no CTA had whole: one CTA a block and eight token rows, a thread four
// columns of one row, the parts in the order of K.
template <int NT, int WN>
constexpr int FixUpThreads() {
  return 8 * 32 * NT * WN / 4;
}
template <int MT, int NT, int WN>
__global__ void __launch_bounds__(FixUpThreads<NT, WN>()) FixUpKernel(const MatmulArgs p) {
  constexpr int kColumns = 32 * NT * WN, kSlot = 8 * MT * kColumns, kQuads = kColumns / 4;
  const int steps = 2 * static_cast<int>(p.tiles_k), begin = blockIdx.x * steps;
  const int first = begin / p.span, last = (begin + steps - 1) / p.span;
  if (first == last) return;
  const int row = blockIdx.y * 8 + threadIdx.x / kQuads, column_in = threadIdx.x % kQuads * 4;
  if (row >= p.m) return;
  // The part of the first owner is its last piece, unless that is its only one; the others begin
  // with this block.
  const int own = first * p.span >= begin ? 0 : kSlot;
  const float* part =
      p.parts + static_cast<int64_t>(2 * first) * kSlot + row * kColumns + column_in;
  const auto quad = [](const float* from) { return *reinterpret_cast<const float4*>(from); };
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + column_in;
  // All loads at once; the last block may be wider than the weight. There are two parts or more.
  float4 global = quad(p.globals + min(column, p.tiles_n * kTileN - 4));
  float bias[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (p.bias && column + i < p.n) bias[i] = __half2float(p.bias[column + i]);
  float4 sum = quad(part + own);
  float4 more = quad(part + 2 * kSlot);
#pragma unroll 1
  for (int owner = first + 1;;) {
    sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
    if (++owner > last) break;
    part += 2 * kSlot;
    more = quad(part + 2 * kSlot);
  }
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    if (column + i < p.n) StoreFinal(p, row, column + i, sum.x, global.x, bias[0]);
    sum = {sum.y, sum.z, sum.w, 0.0f};
    global = {global.y, global.z, global.w, 0.0f};
    bias[0] = bias[1], bias[1] = bias[2], bias[2] = bias[3];
  }
}

}  // namespace nvfp4
