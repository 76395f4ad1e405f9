// What every matmul kernel is given, and how a finished FP32 sum leaves it.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "layout/tile.h"

namespace nvfp4 {

// A run of routed pairs of one expert: the unit of work of a grouped product.
struct alignas(8) RowTile {
  int32_t expert;
  int32_t count;  // rows that exist; 0 past the last tile
};

// The device side of a plan, as the grouped kernels see it.
struct MoeRows {
  const RowTile* tiles;      // [row tiles of the launch]
  const int32_t* pairs;      // [row tiles, rows of a tile]: token * top_k + slot, ascending; the
                             // last one fills the tile up, so that any row has an address
  const int32_t* expert_of;  // [pair_count], -1 = no expert computes the pair
  int32_t pair_count;
  int32_t top_k;
  int64_t packed_stride;   // bytes from expert to expert
  int64_t globals_stride;  // floats
};

struct MatmulArgs {
  const char* packed;    // records, layout/tile.h
  const float* globals;  // [tiles_n * 32]: multiplier or divisor of the column
  const __half* x;       // [rows, k], row stride ldx elements, 16-byte aligned rows
  const __half* bias;    // [n] or null
  __half* y;             // [rows, n], row stride ldy elements
  float* partial;        // dense: [splits, m, n] when K is split, else null; down: [pairs, n]
  float* parts;          // wide skinny kernels: slots for parts of blocks, or null for whole blocks
  int64_t n, k, tiles_n, tiles_k, ldx, ldy;
  int m;
  int span;              // with parts: steps of one CTA
  float epilogue_scale;  // kEpilogueScale of the scale kind
  bool is_divisor;
  MoeRows moe;  // grouped products only
};

// An even share of `count` things for the `index`-th of `parts`: 32-bit, since a 64-bit division
// costs a kernel's first microsecond.
struct Range {
  int begin, end;
};
NVFP4_HD inline Range ShareOf(int count, int index, int parts) {
  const int each = count / parts, more = count % parts;
  const int begin = index * each + (index < more ? index : more);
  return {begin, begin + each + (index < more ? 1 : 0)};
}

enum class Mode { kDense, kGateUp, kDown };

#ifdef __CUDACC__
__device__ __forceinline__ float ApplyGlobal(const MatmulArgs& p, float global, float sum) {
  const float scaled = sum * p.epilogue_scale;  // a power of two: exact
  return p.is_divisor ? __fdiv_rn(scaled, global) : scaled * global;
}

// A whole sum becomes a result; `bias` counts only where the product has one.
__device__ __forceinline__ void StoreFinal(const MatmulArgs& p, int64_t row, int64_t column,
                                           float sum, float global, float bias) {
  float value = ApplyGlobal(p, global, sum);
  if (p.bias) value += bias;
  p.y[row * p.ldy + column] = __float2half_rn(value);
}
__device__ __forceinline__ void StoreFinal(const MatmulArgs& p, int64_t row, int64_t column,
                                           float sum) {
  StoreFinal(p, row, column, sum, p.globals[column], p.bias ? __half2float(p.bias[column]) : 0.0f);
}

// A K split leaves its raw sum for the reduction; a whole sum is finished here.
__device__ __forceinline__ void StoreResult(const MatmulArgs& p, int64_t row, int64_t column,
                                            float sum, float global, float bias) {
  if (p.partial) {
    p.partial[(static_cast<int64_t>(blockIdx.y) * p.m + row) * p.n + column] = sum;
  } else {
    StoreFinal(p, row, column, sum, global, bias);
  }
}

__device__ __forceinline__ float Silu(float z) { return z / (1.0f + __expf(-z)); }

// The rows of one CTA: all of a dense product, or the pairs of a row tile.
struct CtaRows {
  int count;             // rows that exist
  int expert;            // 0 when dense
  const int32_t* pairs;  // null when dense
  int32_t top_k;
};
template <Mode kMode>
__device__ __forceinline__ CtaRows RowsOfTile(const MatmulArgs& p, int tile_index, int tile_rows) {
  if (kMode == Mode::kDense) {
    const int first = tile_index * tile_rows;
    return {min(p.m - first, tile_rows), 0, nullptr, 1};
  }
  int2 tile;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
               : "=r"(tile.x), "=r"(tile.y)
               : "l"(p.moe.tiles + tile_index));
  return {tile.y, tile.x, p.moe.pairs + static_cast<int64_t>(tile_index) * tile_rows, p.moe.top_k};
}
// The first row tile of a gate/up product also clears the rows of pairs that no expert computes:
// columns of this CTA.
__device__ __forceinline__ void ZeroSkipped(const MatmulArgs& p, int64_t begin, int64_t end) {
  end = end < p.n / 2 ? end : p.n / 2;
  for (int pair = threadIdx.x; pair < p.moe.pair_count; pair += blockDim.x) {
    if (p.moe.expert_of[pair] >= 0) continue;
    for (int64_t column = begin; column < end; ++column)
      p.y[pair * p.ldy + column] = __float2half_rn(0.0f);
  }
}
// Row of x that row `i` of the CTA reads; rows past the end repeat the last one.
template <Mode kMode>
__device__ __forceinline__ int64_t SourceRow(const CtaRows& rows, int i) {
  if (kMode == Mode::kDense) return min(i, rows.count - 1);
  int pair;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(pair) : "l"(rows.pairs + i));
  return kMode == Mode::kGateUp ? pair / rows.top_k : pair;
}
#endif

}  // namespace nvfp4
