// What the kernels of the gated delta rule share: sequences, gates, element types.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "../gdn_args.h"

namespace nvfp4 {

constexpr float kSoftplusLimit = 20.0f;
constexpr float kKeyNormEps = 1e-6f;

struct GdnSequence {
  int32_t begin, end;  // rows
  int32_t slot;
  bool is_used, has_state;
};

__device__ __forceinline__ GdnSequence SequenceAt(const GdnBatch& batch, int index) {
  GdnSequence found;
  found.begin = batch.query_start[index];
  found.end = batch.query_start[index + 1];
  found.slot = batch.slots[index];
  if (index < batch.decode_sequences) found.end = min(found.end, found.begin + 1);
  found.is_used =
      found.slot >= batch.first_slot && found.slot < batch.slot_count && found.end > found.begin;
  found.has_state = batch.has_initial_state == nullptr || batch.has_initial_state[index] != 0;
  return found;
}

__device__ __forceinline__ float LoadAs(bool is_half, const void* data, int64_t i) {
  return is_half ? __half2float(static_cast<const __half*>(data)[i])
                 : static_cast<const float*>(data)[i];
}

__device__ __forceinline__ float SigmoidOf(float z) { return __fdividef(1.0f, 1.0f + __expf(-z)); }
__device__ __forceinline__ float SiluOf(float z) { return z * SigmoidOf(z); }

struct GdnGates {
  float log_decay, beta;
};

__device__ __forceinline__ GdnGates GatesAt(const DeltaArgs& args, int64_t token, int head) {
  const float x = LoadAs(args.are_gates_half, args.a, token * args.a_stride + head) +
                  LoadAs(args.is_dt_bias_half, args.dt_bias, head);
  const float soft = x > kSoftplusLimit ? x : log1pf(expf(x));
  const float b = LoadAs(args.are_gates_half, args.b, token * args.b_stride + head);
  return {-expf(LoadAs(args.is_a_log_half, args.a_log, head)) * soft, SigmoidOf(b)};
}

// Four elements of the state, FP32 or FP16.
__device__ __forceinline__ float4 LoadState(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
__device__ __forceinline__ float4 LoadState(const __half* from) {
  const uint2 raw = *reinterpret_cast<const uint2*>(from);
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
  return make_float4(low.x, low.y, high.x, high.y);
}
__device__ __forceinline__ void StoreState(float* to, const float4& v) {
  *reinterpret_cast<float4*>(to) = v;
}
__device__ __forceinline__ void StoreState(__half* to, const float4& v) {
  const __half2 low = __floats2half2_rn(v.x, v.y), high = __floats2half2_rn(v.z, v.w);
  uint2 raw;
  raw.x = *reinterpret_cast<const uint32_t*>(&low);
  raw.y = *reinterpret_cast<const uint32_t*>(&high);
  *reinterpret_cast<uint2*>(to) = raw;
}

}  // namespace nvfp4
