// The down product of few tokens: y[token] = sum over slots of weight * (x[pair] . W[expert]^T), in
// one launch.
//
// Idea   A CTA owns 32 columns of one token and all its slots: eight warps a K split, each on one
//        slot at a time. The sums of a slot never leave the CTA, so no partial rows go through
//        memory and no second launch adds them. An expert that two tokens share is read twice; the
//        caller takes this kernel where that is rare.
// Order  K splits 0, 1, then slots in ascending order: the result depends on the routing only.
// Limit  weight bytes / read bandwidth, and the latency of the first load.
#include "launch.h"
#include "sm70_nvfp4_skinny.cuh"

namespace nvfp4 {
namespace {

constexpr int kSlots = 8, kSplits = 2, kWarps = kSlots * kSplits, kThreads = kWarps * 32;
constexpr int kPlanes = kSplits + 1;  // of a slot in shared memory: the sums, then the globals

template <int MT, bool kFloatScale>
__global__ void __launch_bounds__(kThreads, 1)
    TokenDownKernel(const MatmulArgs p, const float* weights) {
  static_assert(MT == 1, "one token is one row of one tile");
  __shared__ uint4 slabs[kWarps][kTileK / 8];
  extern __shared__ float planes[];  // [top_k][kPlanes][32]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, split = warp / kSlots;
  const int first_pair = blockIdx.y * p.moe.top_k, tiles_k = static_cast<int>(p.tiles_k);
  const int64_t tile = blockIdx.x;
  const Range steps = ShareOf(tiles_k, split, kSplits);
  uint4* slab = slabs[warp];
  // Every row of the tensor-core operand is the token: all eight rows of the sums are equal.
  const char* row = reinterpret_cast<const char*>(slab);
  const auto last_piece = static_cast<uint32_t>(p.k / 8 - 1);

  for (int slot = warp % kSlots; slot < p.moe.top_k; slot += kSlots) {
    const int pair = first_pair + slot, expert = __ldg(p.moe.expert_of + pair);
    if (expert < 0) continue;
    const char* record = p.packed + expert * p.moe.packed_stride +
                         RecordOffset(tile, steps.begin, p.tiles_n) + lane * 16;
    const uint4* x_row = reinterpret_cast<const uint4*>(p.x + pair * p.ldx);
    StepWeights<1> step;
    uint4 x;
    const auto load_codes = [&](int h) {
      step.codes[0][h] = LoadStream128(record + h * kHalfBytes);
    };
    const auto load_x = [&](int s) {
      // Past K the weights are zero: any finite token does.
      x = __ldg(x_row + min(s * 8u + (lane & 7), last_piece));
    };
    load_codes(0);
    load_codes(1);
    step.scales[0] = LoadStream32(record + kScaleOffset - lane * 12);
    load_x(steps.begin);
    const float global = __ldg(p.globals + expert * p.moe.globals_stride + tile * kTileN + lane);
    float acc[1][1][8];
    Clear(acc);
#pragma unroll 1
    for (int s = steps.begin; s < steps.end; ++s) {
      __syncwarp();
      if (lane < 8) slab[lane] = x;
      __syncwarp();
      const uint32_t scale_words[1] = {step.scales[0]};
      const ScalePair scales[1] = {DecodeScales(step.scales[0])};
      // The last step loads itself again.
      if (s + 1 < steps.end) record += p.tiles_n * kRecordBytes;
      load_x(s + 1);
      step.scales[0] = LoadStream32(record + kScaleOffset - lane * 12);
      float sum[1][1][8];
      if (kFloatScale) Clear(sum);
      float (&into)[1][1][8] = kFloatScale ? sum : acc;
      FeedHalf<1, 1, 0, kFloatScale>(into, step, scales, row);
      load_codes(0);
      FeedHalf<1, 1, 1, kFloatScale>(into, step, scales, row);
      load_codes(1);
      if (kFloatScale) AddScaled(acc, sum, scale_words, lane);
    }
    float* plane = planes + slot * kPlanes * 32;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (AccumulatorRow(lane, i) == 0)
        plane[split * 32 + AccumulatorColumn(lane, i)] = acc[0][0][i];
    if (split == 0) plane[kSplits * 32 + lane] = global;
  }
  __syncthreads();
  const int64_t column = tile * kTileN + lane;
  if (warp != 0 || column >= p.n) return;
  float sum = 0.0f;
  for (int slot = 0; slot < p.moe.top_k; ++slot) {
    const int pair = first_pair + slot;
    if (__ldg(p.moe.expert_of + pair) < 0) continue;
    const float* plane = planes + slot * kPlanes * 32 + lane;
    float product = plane[0];
#pragma unroll
    for (int i = 1; i < kSplits; ++i) product += plane[i * 32];
    sum += __ldg(weights + pair) * ApplyGlobal(p, plane[kSplits * 32], product);
  }
  p.y[blockIdx.y * p.ldy + column] = __float2half_rn(sum);
}

}  // namespace

cudaError_t LaunchTokenDown(const MatmulArgs& args, const float* weights, int64_t tokens,
                            bool float_scale, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(args.tiles_n), static_cast<unsigned>(tokens));
  const size_t shared_bytes = sizeof(float) * kPlanes * 32 * static_cast<size_t>(args.moe.top_k);
  if (float_scale) {
    TokenDownKernel<1, true><<<grid, kThreads, shared_bytes, stream>>>(args, weights);
  } else {
    TokenDownKernel<1, false><<<grid, kThreads, shared_bytes, stream>>>(args, weights);
  }
  return cudaGetLastError();
}

}  // namespace nvfp4
