// The gated norm behind the delta rule: 16 lanes own a head of a token and keep it in registers,
// bound by launch and bandwidth. y may be x or z: a lane writes only what it alone has read.
#include "device/gdn.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kLanesOfHead = 16;
constexpr int kMostHidden = 512;

// As one access each: the compiler splits the first of a row into four otherwise.
__device__ __forceinline__ uint4 Load16(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ __forceinline__ void Store16(void* to, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};"
               :
               : "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// The values of 16 bytes, and back.
__device__ __forceinline__ void Unpack(const uint4& raw, float (&v)[8]) {
  const auto* pairs = reinterpret_cast<const __half2*>(&raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(pairs[i]);
    v[2 * i] = pair.x;
    v[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ void Unpack(const uint4& raw, float (&v)[4]) {
  v[0] = __uint_as_float(raw.x);
  v[1] = __uint_as_float(raw.y);
  v[2] = __uint_as_float(raw.z);
  v[3] = __uint_as_float(raw.w);
}
__device__ __forceinline__ uint32_t PackPair(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint4 Pack(const float (&v)[8]) {
  return make_uint4(PackPair(v[0], v[1]), PackPair(v[2], v[3]), PackPair(v[4], v[5]),
                    PackPair(v[6], v[7]));
}
__device__ __forceinline__ uint4 Pack(const float (&v)[4]) {
  return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                    __float_as_uint(v[3]));
}

template <typename T>
__global__ void __launch_bounds__(kThreads) GatedNormKernel(const nvfp4_gate_norm p) {
  constexpr int kWidth = 16 / sizeof(T);
  constexpr int kPieces = kMostHidden / (kLanesOfHead * kWidth);
  __shared__ float4 gains[kMostHidden / 4];
  for (int i = threadIdx.x; i < p.hidden; i += kThreads)
    reinterpret_cast<float*>(gains)[i] = LoadAs(p.weight_type == NVFP4_F16, p.weight, i);
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kThreads / kLanesOfHead) + threadIdx.x / kLanesOfHead;
  const int lane = threadIdx.x % kLanesOfHead;
  const int64_t token = row / p.heads, head = row % p.heads;
  const bool is_there = token < p.tokens;  // the rest of a warp still takes part in its sums
  const T* x = static_cast<const T*>(p.x) + token * p.x_stride + head * p.hidden;
  const T* z = static_cast<const T*>(p.z) + token * p.z_stride + head * p.hidden;
  T* y = static_cast<T*>(p.y) + token * p.y_stride + head * p.hidden;
  const int count = is_there ? static_cast<int>(p.hidden) : 0;
  uint4 kept[kPieces];
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const int i = (j * kLanesOfHead + lane) * kWidth;
    if (i >= count) continue;
    kept[j] = Load16(x + i);
    float value[kWidth];
    Unpack(kept[j], value);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) squares = fmaf(value[e], value[e], squares);
  }
  __syncthreads();
#pragma unroll
  for (int step = kLanesOfHead / 2; step > 0; step /= 2)
    squares += __shfl_xor_sync(0xFFFFFFFFu, squares, step);
  const float inverse = rsqrtf(squares / static_cast<float>(p.hidden) + p.eps);
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const int i = (j * kLanesOfHead + lane) * kWidth;
    if (i >= count) continue;
    float value[kWidth], open[kWidth], gain[kWidth];
#pragma unroll
    for (int e = 0; e < kWidth; e += 4) {
      const float4 four = gains[(i + e) / 4];
      gain[e] = four.x;
      gain[e + 1] = four.y;
      gain[e + 2] = four.z;
      gain[e + 3] = four.w;
    }
    Unpack(Load16(z + i), open);
    Unpack(kept[j], value);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float factor = p.gate == NVFP4_GATE_SILU ? SiluOf(open[e]) : SigmoidOf(open[e]);
      value[e] *= inverse * gain[e] * factor;
    }
    Store16(y + i, Pack(value));
  }
}

}  // namespace

cudaError_t LaunchGatedNorm(const nvfp4_gate_norm& p, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(CeilDiv(p.tokens * p.heads, kThreads / kLanesOfHead));
  if (p.io_type == NVFP4_F16) {
    GatedNormKernel<__half><<<grid, kThreads, 0, stream>>>(p);
  } else {
    GatedNormKernel<float><<<grid, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace nvfp4
