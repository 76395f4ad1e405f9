// The splits of the keys put together, in order: of decode rows, and of the tiles of prefill.
#pragma once
#include "device/decode_keys.cuh"
#include "device/prefill_keys.cuh"

namespace nvfp4 {

// Splits of one query row in order: kGroups of them side by side, then the groups.
template <int D>
__global__ void __launch_bounds__(256) AttentionCombineKernel(const AttentionArgs p) {
  constexpr int kPieces = D / 4, kGroups = 256 / kPieces;
  __shared__ float scales[kMostSplits];
  __shared__ __align__(16) float4 parts[kGroups][kPieces];
  __shared__ float denominator;
  const int sequence = blockIdx.y, head = blockIdx.x / p.rows, row = blockIdx.x % p.rows;
  const DecodeQueries queries(p, sequence);
  if (row >= queries.count * p.ratio) return;
  const KeyRange keys(p, queries.position, queries.count);
  const int used = max(KeySplit(keys, kStepKeys, p.splits, 0).used, 1);
  const int64_t base =
      (static_cast<int64_t>(sequence) * p.kv_heads + head) * p.splits * p.rows + row;
  if (threadIdx.x < 32) {
    float largest = kNoScore, total = 0.0f;
    for (int s = threadIdx.x; s < used; s += 32)
      largest = fmaxf(largest, p.stats[base + static_cast<int64_t>(s) * p.rows].x);
    for (int step = 16; step > 0; step /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
    for (int s = threadIdx.x; s < used; s += 32) {
      const float2 stat = p.stats[base + static_cast<int64_t>(s) * p.rows];
      scales[s] = Exp2(stat.x - largest);
      total += stat.y * scales[s];
    }
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(kAllLanes, total, step);
    if (threadIdx.x == 0) denominator = total;
  }
  __syncthreads();
  const int piece = threadIdx.x % kPieces, group = threadIdx.x / kPieces;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
  for (int s = group; s < used; s += kGroups) {
    const float4 part = *reinterpret_cast<const float4*>(
        p.partial + (base + static_cast<int64_t>(s) * p.rows) * D + piece * 4);
    sum.x += part.x * scales[s];
    sum.y += part.y * scales[s];
    sum.z += part.z * scales[s];
    sum.w += part.w * scales[s];
  }
  parts[group][piece] = sum;
  __syncthreads();
  if (group > 0) return;
  for (int g = 1; g < kGroups; ++g) {
    const float4 part = parts[g][piece];
    sum.x += part.x;
    sum.y += part.y;
    sum.z += part.z;
    sum.w += part.w;
  }
  const float inverse = denominator == 0.0f ? 0.0f : 1.0f / denominator;
  const int64_t token = queries.first_token + row / p.ratio;
  __half* to = p.out + token * p.out_stride + (head * p.ratio + row % p.ratio) * D + piece * 4;
  *reinterpret_cast<uint2*>(to) = make_uint2(PackHalves(sum.x * inverse, sum.y * inverse),
                                             PackHalves(sum.z * inverse, sum.w * inverse));
}

// One warp a row of a tile.
template <int D>
__global__ void __launch_bounds__(256) AttentionTileCombineKernel(const AttentionArgs p) {
  constexpr int kRows = PrefillShape<D>::kRows, kWidth = D / 32;
  const PrefillTile tile(p, blockIdx.x, kRows);
  const int head = blockIdx.y, lane = threadIdx.x & 31;
  const int row = blockIdx.z * 8 + (threadIdx.x >> 5), at = tile.first_row + row;
  if (row >= tile.rows) return;
  const int used = max(KeySplit(tile.Keys(p), PrefillShape<D>::kKeys, p.tile_splits, 0).used, 1);
  const int64_t base = PrefillTile::PartOf(p, blockIdx.x, head, 0, kRows) + row;
  float largest = kNoScore, total = 0.0f;
  for (int s = lane; s < used; s += 32)
    largest = fmaxf(largest, p.tile_stats[base + static_cast<int64_t>(s) * kRows].x);
  for (int step = 16; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
  float sums[kWidth];
  for (int i = 0; i < kWidth; ++i) sums[i] = 0.0f;
#pragma unroll 4
  for (int s = 0; s < used; ++s) {
    const int64_t part = base + static_cast<int64_t>(s) * kRows;
    const float2 stat = p.tile_stats[part];
    const float keep = Exp2(stat.x - largest);
    total += stat.y * keep;
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      const float2 sum =
          *reinterpret_cast<const float2*>(p.tile_partial + part * D + i * 32 + lane * 2);
      sums[i] += sum.x * keep;
      sums[i + 1] += sum.y * keep;
    }
  }
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  const int64_t token = tile.first_token + at / p.ratio;
  __half* to = p.out + token * p.out_stride + (head * p.ratio + at % p.ratio) * D + lane * 2;
#pragma unroll
  for (int i = 0; i < kWidth; i += 2)
    *reinterpret_cast<uint32_t*>(to + i * 32) =
        PackHalves(sums[i] * inverse, sums[i + 1] * inverse);
}

}  // namespace nvfp4
