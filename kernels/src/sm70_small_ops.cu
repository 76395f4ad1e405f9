// The operations beside the products: norms, silu-mul, rotary positions with the cache write,
// routing.
//
// All compute in FP32 and round once; all are bound by launch and bandwidth, so each is the plain
// loop, eight elements a thread where rows are aligned to 16 bytes.
#include <cuda_fp16.h>

#include "launch.h"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float ToFloat(__half v) { return __half2float(v); }
__device__ __forceinline__ float ToFloat(float v) { return v; }
__device__ __forceinline__ void Put(__half* to, float v) { *to = __float2half_rn(v); }
__device__ __forceinline__ void Put(float* to, float v) { *to = v; }

// kWidth consecutive elements; with kWidth > 1 the address is a multiple of their size.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T v[kWidth];
};
template <int kWidth, typename T>
__device__ __forceinline__ void LoadPack(const T* from, float (&out)[kWidth]) {
  const auto pack = *reinterpret_cast<const Pack<T, kWidth>*>(from);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) out[i] = ToFloat(pack.v[i]);
}
template <int kWidth, typename T>
__device__ __forceinline__ void StorePack(T* to, const float (&in)[kWidth]) {
  Pack<T, kWidth> pack;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) Put(&pack.v[i], in[i]);
  *reinterpret_cast<Pack<T, kWidth>*>(to) = pack;
}
bool Packs(const void* pointer, int64_t stride, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride * bytes % 16 == 0;
}

__device__ float BlockSum(float value) {
  __shared__ float sums[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
  for (int w = 0; w < kThreads / 32; ++w) sum += sums[w];
  return sum;
}

// x (+ residual) in FP32.
template <int kWidth, typename T>
__device__ __forceinline__ void Summand(const T* x, const T* residual, int64_t i,
                                        float (&value)[kWidth]) {
  LoadPack<kWidth>(x + i, value);
  if (!residual) return;
  float other[kWidth];
  LoadPack<kWidth>(residual + i, other);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) value[j] += other[j];
}

template <typename T, typename W, int kWidth>
__global__ void __launch_bounds__(kThreads) NormKernel(const nvfp4_norm p) {
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  T* residual = p.residual ? static_cast<T*>(p.residual) + row * p.residual_stride : nullptr;
  T* y = static_cast<T*>(p.y) + row * p.y_stride;
  float squares = 0.0f;
  for (int64_t i = threadIdx.x * kWidth; i < p.hidden; i += kThreads * kWidth) {
    float value[kWidth];
    Summand<kWidth>(x, residual, i, value);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) squares += value[j] * value[j];
  }
  const float inverse = rsqrtf(BlockSum(squares) / static_cast<float>(p.hidden) + p.eps);
  for (int64_t i = threadIdx.x * kWidth; i < p.hidden; i += kThreads * kWidth) {
    float value[kWidth];
    Summand<kWidth>(x, residual, i,
                    value);  // the old residual: each thread rewrites what it alone reads
    if (residual) StorePack<kWidth>(residual + i, value);
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      value[j] =
          value[j] * inverse * (ToFloat(static_cast<const W*>(p.weight)[i + j]) + p.weight_offset);
    StorePack<kWidth>(y + i, value);
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    SiluMulKernel(int64_t rows, int64_t width, const T* x, int64_t ldx, T* y, int64_t ldy) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  if (i >= width) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    float gate[kWidth], up[kWidth];
    LoadPack<kWidth>(x + row * ldx + i, gate);
    LoadPack<kWidth>(x + row * ldx + width + i, up);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) gate[j] = gate[j] / (1.0f + expf(-gate[j])) * up[j];
    StorePack<kWidth>(y + row * ldy + i, gate);
  }
}

template <typename T, typename C>
__device__ __forceinline__ void Rotate(const nvfp4_rotary& p, T* head, const C* turn, int64_t i) {
  const int64_t half = p.rotary_dim / 2;
  T* a = head + (p.is_neox ? i : 2 * i);
  T* b = head + (p.is_neox ? i + half : 2 * i + 1);
  const float cosine = ToFloat(turn[i]), sine = ToFloat(turn[half + i]), u = ToFloat(*a),
              v = ToFloat(*b);
  Put(a, u * cosine - v * sine);
  Put(b, v * cosine + u * sine);
}

template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) RotaryKernel(const nvfp4_rotary p) {
  const int64_t token = blockIdx.x;
  T* k = static_cast<T*>(p.k) + token * p.k_stride;
  const int64_t position = p.cos_sin ? p.positions[token] : -1;
  if (position >= 0 && position < p.max_position) {
    const C* turn = static_cast<const C*>(p.cos_sin) + position * p.rotary_dim;
    const int64_t half = p.rotary_dim / 2, q_heads = p.q ? p.q_heads : 0;
    for (int64_t e = threadIdx.x; e < (q_heads + p.kv_heads) * half; e += kThreads) {
      const int64_t head = e / half;
      T* base = head < q_heads ? static_cast<T*>(p.q) + token * p.q_stride + head * p.head_dim
                               : k + (head - q_heads) * p.head_dim;
      Rotate(p, base, turn, e % half);
    }
  }
  if (!p.k_cache) return;
  const int64_t slot = p.slots[token];
  if (slot < 0 || slot / p.block_size >= p.blocks) return;
  // Two tokens may name one slot; the later one wins, every time.
  bool replaced = false;
  for (int64_t later = token + 1 + threadIdx.x; later < p.tokens; later += kThreads)
    replaced = replaced || p.slots[later] == slot;
  if (__syncthreads_or(replaced)) return;  // also makes the rotated k of this block visible
  const T* v = static_cast<const T*>(p.v) + token * p.v_stride;
  const int64_t place =
      slot / p.block_size * p.cache_block_stride + slot % p.block_size * p.cache_token_stride;
  for (int64_t e = threadIdx.x; e < p.kv_heads * p.head_dim; e += kThreads) {
    const int64_t target = place + e / p.head_dim * p.cache_head_stride + e % p.head_dim;
    static_cast<T*>(p.k_cache)[target] = k[e];
    static_cast<T*>(p.v_cache)[target] = v[e];
  }
}

// The better of two (value, expert): larger, and the lower expert among equals. expert < 0 = none.
__device__ __forceinline__ bool IsBetter(float value, int expert, float other, int other_expert) {
  if (other_expert < 0) return expert >= 0;
  if (expert < 0) return false;
  return value > other || (value == other && expert < other_expert);
}

// One warp a row. Each round takes the best that comes after the last one taken, so no list of
// taken ones is kept.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    TopKKernel(int64_t m, int experts, int top_k, const T* logits, int64_t stride, bool renormalize,
               int32_t* ids, float* weights) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x & 31;
  if (row >= m) return;
  const T* at = logits + row * stride;
  float largest = -INFINITY, denominator = 0.0f;
  for (int e = lane; e < experts; e += 32) largest = fmaxf(largest, ToFloat(at[e]));
  for (int step = 16; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
  for (int e = lane; e < experts; e += 32) denominator += expf(ToFloat(at[e]) - largest);
  for (int step = 16; step > 0; step /= 2)
    denominator += __shfl_xor_sync(0xFFFFFFFFu, denominator, step);
  const bool invalid = denominator != denominator;
  float last = INFINITY, sum = 0.0f;
  int last_expert = -1;
  for (int slot = 0; slot < top_k; ++slot) {
    float best = 0.0f;
    int best_expert = -1;
    for (int e = lane; e < experts; e += 32) {
      const float value = ToFloat(at[e]);
      const bool is_left = value < last || (value == last && e > last_expert);
      if (is_left && IsBetter(value, e, best, best_expert)) {
        best = value;
        best_expert = e;
      }
    }
    for (int step = 16; step > 0; step /= 2) {
      const float value = __shfl_xor_sync(0xFFFFFFFFu, best, step);
      const int expert = __shfl_xor_sync(0xFFFFFFFFu, best_expert, step);
      if (IsBetter(value, expert, best, best_expert)) {
        best = value;
        best_expert = expert;
      }
    }
    last = best;
    last_expert = best_expert;
    const float weight = expf(best - largest);
    sum += weight;
    if (lane == 0) {
      ids[row * top_k + slot] = invalid ? slot : best_expert;
      weights[row * top_k + slot] = invalid ? NAN : weight;
    }
  }
  __syncwarp();
  if (invalid) return;
  const float divisor = renormalize ? sum : denominator;
  for (int slot = lane; slot < top_k; slot += 32) weights[row * top_k + slot] /= divisor;
}

template <typename T, typename W>
void StartNorm(const nvfp4_norm& p, cudaStream_t stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const auto grid = static_cast<unsigned>(p.rows);
  const bool wide = p.hidden % kWidth == 0 && Packs(p.x, p.x_stride, sizeof(T)) &&
                    Packs(p.y, p.y_stride, sizeof(T)) &&
                    (!p.residual || Packs(p.residual, p.residual_stride, sizeof(T)));
  if (wide) {
    NormKernel<T, W, kWidth><<<grid, kThreads, 0, stream>>>(p);
  } else {
    NormKernel<T, W, 1><<<grid, kThreads, 0, stream>>>(p);
  }
}

template <typename T>
void StartSiluMul(int64_t rows, int64_t width, const void* x, int64_t ldx, void* y, int64_t ldy,
                  cudaStream_t stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const bool wide = width % kWidth == 0 && Packs(x, ldx, sizeof(T)) && Packs(y, ldy, sizeof(T));
  const int64_t threads = wide ? width / kWidth : width;
  const dim3 grid(static_cast<unsigned>(CeilDiv(threads, kThreads)),
                  static_cast<unsigned>(rows < 65535 ? rows : 65535));
  if (wide) {
    SiluMulKernel<T, kWidth><<<grid, kThreads, 0, stream>>>(rows, width, static_cast<const T*>(x),
                                                            ldx, static_cast<T*>(y), ldy);
  } else {
    SiluMulKernel<T, 1><<<grid, kThreads, 0, stream>>>(rows, width, static_cast<const T*>(x), ldx,
                                                       static_cast<T*>(y), ldy);
  }
}

}  // namespace

cudaError_t LaunchNorm(const nvfp4_norm& p, cudaStream_t stream) {
  const bool half_io = p.io_type == NVFP4_F16, half_weight = p.weight_type == NVFP4_F16;
  if (half_io) {
    half_weight ? StartNorm<__half, __half>(p, stream) : StartNorm<__half, float>(p, stream);
  } else {
    half_weight ? StartNorm<float, __half>(p, stream) : StartNorm<float, float>(p, stream);
  }
  return cudaGetLastError();
}

cudaError_t LaunchSiluMul(nvfp4_type type, int64_t rows, int64_t width, const void* x, int64_t ldx,
                          void* y, int64_t ldy, cudaStream_t stream) {
  if (type == NVFP4_F16) {
    StartSiluMul<__half>(rows, width, x, ldx, y, ldy, stream);
  } else {
    StartSiluMul<float>(rows, width, x, ldx, y, ldy, stream);
  }
  return cudaGetLastError();
}

cudaError_t LaunchRotary(const nvfp4_rotary& p, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(p.tokens);
  const bool half_turn = p.cos_sin_type == NVFP4_F16;
  if (p.io_type == NVFP4_F16) {
    half_turn ? RotaryKernel<__half, __half><<<grid, kThreads, 0, stream>>>(p)
              : RotaryKernel<__half, float><<<grid, kThreads, 0, stream>>>(p);
  } else {
    half_turn ? RotaryKernel<float, __half><<<grid, kThreads, 0, stream>>>(p)
              : RotaryKernel<float, float><<<grid, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

cudaError_t LaunchTopK(nvfp4_type type, int64_t m, int64_t experts, int64_t top_k,
                       const void* logits, int64_t stride, bool renormalize, int32_t* ids,
                       float* weights, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(CeilDiv(m, kThreads / 32));
  if (type == NVFP4_F16) {
    TopKKernel<<<grid, kThreads, 0, stream>>>(m, static_cast<int>(experts), static_cast<int>(top_k),
                                              static_cast<const __half*>(logits), stride,
                                              renormalize, ids, weights);
  } else {
    TopKKernel<<<grid, kThreads, 0, stream>>>(m, static_cast<int>(experts), static_cast<int>(top_k),
                                              static_cast<const float*>(logits), stride,
                                              renormalize, ids, weights);
  }
  return cudaGetLastError();
}

}  // namespace nvfp4
