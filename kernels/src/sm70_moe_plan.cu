// Routing plan on the device: pairs sorted by expert, and row tiles that never mix experts.
//
// Idea   One CTA an expert, none waits for another: each counts the pairs of all experts in shared
// memory (integer
//        additions, so their order does not matter), takes the prefix of its own from that, and
//        writes its pairs in ascending order by ballots. No host copy, no global atomics, one
//        launch.
// Limit  every CTA reads all ids: experts * pairs * 4 bytes out of L2.
#include "launch.h"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__device__ int LocalExpert(const PlanArgs& p, int pair) {
  const int id = p.ids[pair];
  if (id < 0 || id >= (p.expert_map ? p.map_size : static_cast<int64_t>(p.experts))) return -1;
  const int local = p.expert_map ? p.expert_map[id] : id;
  return local >= 0 && local < p.experts ? local : -1;
}

__device__ int BlockSum(int value, int* scratch) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  int sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += scratch[w];
  return sum;
}

__global__ void __launch_bounds__(kThreads) PlanKernel(const PlanArgs p) {
  extern __shared__ int counts[];  // [experts]
  __shared__ int scratch[kWarps];
  const int expert = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  for (int e = threadIdx.x; e < p.experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  auto* expert_of = reinterpret_cast<int32_t*>(p.plan + p.at.expert_of);
  for (int pair = threadIdx.x; pair < p.pair_count; pair += kThreads) {
    const int local = LocalExpert(p, pair);
    if (local >= 0) atomicAdd(&counts[local], 1);
    if (expert == 0) expert_of[pair] = local;
  }
  __syncthreads();
  int tiles_before = 0;
  for (int e = threadIdx.x; e < expert; e += kThreads)
    tiles_before += (counts[e] + p.tile_rows - 1) / p.tile_rows;
  const int first_tile = BlockSum(tiles_before, scratch), count = counts[expert];
  const int own_tiles = (count + p.tile_rows - 1) / p.tile_rows;
  auto* tiles = reinterpret_cast<RowTile*>(p.plan + p.at.tiles);
  for (int t = threadIdx.x; t < own_tiles; t += kThreads)
    tiles[first_tile + t] = {expert, min(count - t * p.tile_rows, p.tile_rows)};
  if (expert == p.experts - 1) {
    for (int t = first_tile + own_tiles + threadIdx.x; t < p.row_tiles; t += kThreads)
      tiles[t] = {0, 0};
  }

  auto* pairs = reinterpret_cast<int32_t*>(p.plan + p.at.pairs) + first_tile * p.tile_rows;
  int written = 0;
  for (int base = 0; base < p.pair_count && written < count; base += kThreads) {
    const int pair = base + threadIdx.x;
    const bool mine = pair < p.pair_count && LocalExpert(p, pair) == expert;
    const unsigned votes = __ballot_sync(0xFFFFFFFFu, mine);
    __syncthreads();
    if (lane == 0) scratch[warp] = __popc(votes);
    __syncthreads();
    int at = written;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) at += scratch[w];
      written += scratch[w];
    }
    if (!mine) continue;
    at += __popc(votes & ((1u << lane) - 1u));
    pairs[at] = pair;
    if (at == count - 1) {
      while (++at < own_tiles * p.tile_rows) pairs[at] = pair;
    }
  }
}

}  // namespace

cudaError_t LaunchMoePlan(const PlanArgs& args, cudaStream_t stream) {
  PlanKernel<<<static_cast<unsigned>(args.experts), kThreads, static_cast<size_t>(args.experts) * 4,
               stream>>>(args);
  return cudaGetLastError();
}

}  // namespace nvfp4
