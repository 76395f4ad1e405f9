// Packed records to plain rows, FP16 or FP32: the slice that a caller's GEMM reads, and the check
// of a repack.
//
// Idea   A warp decodes one tile (32 columns x 64 k, a column a lane), turns it through shared
// memory, and writes
//        whole 128-byte pieces of the rows.
// Limit  copy bandwidth: 0.5625 bytes read, 2 (or 4) written a weight.
#include "device/decode.cuh"
#include "launch.h"

namespace nvfp4 {
namespace {

constexpr int kWarps = 8;
constexpr int kPitchWords = 36;  // 64 halves and 16 bytes: eight rows start in different banks

// Eight values of k 8w..8w+7 of a lane's column, exact: code * scale.
template <bool kFloatScale>
__device__ __forceinline__ void Values(uint32_t word, uint32_t scale_word, int group,
                                       float (&out)[8]) {
  uint32_t halves[4];
  DecodeWord(word, halves);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = MulHalf2(halves[i], kHalf2Pow14);
    const float2 value = __half22float2(*reinterpret_cast<const __half2*>(&code));
    out[2 * i] = value.x;
    out[2 * i + 1] = value.y;
  }
  if (kFloatScale) return;
  const uint32_t half = ((scale_word >> (8 * group)) & 0xFFu) << 7;
  const float scale =
      __half2float(__ushort_as_half(static_cast<unsigned short>(half))) * (1.0f / 128.0f);
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] *= scale;
}

// The global, rounded once to FP32.
template <bool kFloatScale>
__device__ __forceinline__ float Scaled(const DequantizeArgs& p, float value, float scale,
                                        float global) {
  if (kFloatScale) {
    const double exact = static_cast<double>(value) * static_cast<double>(scale);
    if (p.unscaled) return static_cast<float>(exact);
    return static_cast<float>(p.is_divisor ? exact / static_cast<double>(global)
                                           : exact * static_cast<double>(global));
  }
  if (p.unscaled) return value;
  return p.is_divisor ? __fdiv_rn(value, global) : value * global;
}

__device__ __forceinline__ void StoreEight(float* out, const float (&v)[8]) {
  reinterpret_cast<float4*>(out)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(out)[1] = make_float4(v[4], v[5], v[6], v[7]);
}
__device__ __forceinline__ uint32_t PackHalf2(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// FP16 out: 64 k of a row are 128 bytes.
template <bool kFloatScale>
__global__ void __launch_bounds__(kWarps * 32) DequantizeHalf(const DequantizeArgs p) {
  __shared__ __align__(16) uint32_t turn[kWarps][32][kPitchWords];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int64_t tile_n = p.first_tile + blockIdx.x;
  const int64_t physical = tile_n * kTileN + ColumnOfLane(lane);
  const float global = p.globals[physical];
  for (int64_t tile_k = static_cast<int64_t>(blockIdx.y) * kWarps + warp; tile_k < p.tiles_k;
       tile_k += static_cast<int64_t>(gridDim.y) * kWarps) {
    const char* record = p.packed + RecordOffset(tile_n, tile_k, p.tiles_n);
    const uint4 low = LoadStream128(record + lane * 16),
                high = LoadStream128(record + kHalfBytes + lane * 16);
    const uint32_t scales = LoadStream32(record + kScaleOffset + lane * 4);
    const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint32_t* mine = turn[warp][ColumnOfLane(lane)];
    __syncwarp();
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      float v[8];
      Values<kFloatScale>(words[w], scales, w / 2, v);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        v[i] = Scaled<kFloatScale>(p, v[i], __uint_as_float(scales), global);
      *reinterpret_cast<uint4*>(mine + 4 * w) =
          make_uint4(PackHalf2(v[0], v[1]), PackHalf2(v[2], v[3]), PackHalf2(v[4], v[5]),
                     PackHalf2(v[6], v[7]));
    }
    __syncwarp();
    const int64_t k = tile_k * kTileK + (lane & 7) * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int column = i * 4 + (lane >> 3);
      const int64_t row = LogicalRow(tile_n * kTileN + column, p.n, p.gate_up) - p.row_begin;
      if (row >= 0 && row < p.rows && k < p.k) {
        const uint4 piece = *reinterpret_cast<const uint4*>(&turn[warp][column][(lane & 7) * 4]);
        *reinterpret_cast<uint4*>(static_cast<__half*>(p.out) + row * p.out_stride + k) = piece;
      }
    }
  }
}

// FP32 out, for checks: straight from the lanes.
template <bool kFloatScale>
__global__ void __launch_bounds__(kWarps * 32) DequantizeFloat(const DequantizeArgs p) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int64_t tile_n = p.first_tile + blockIdx.x;
  const int64_t physical = tile_n * kTileN + ColumnOfLane(lane);
  const int64_t row = LogicalRow(physical, p.n, p.gate_up) - p.row_begin;
  if (row < 0 || row >= p.rows) return;
  const float global = p.globals[physical];
  for (int64_t tile_k = static_cast<int64_t>(blockIdx.y) * kWarps + warp; tile_k < p.tiles_k;
       tile_k += static_cast<int64_t>(gridDim.y) * kWarps) {
    const char* record = p.packed + RecordOffset(tile_n, tile_k, p.tiles_n);
    const uint32_t scales = LoadStream32(record + kScaleOffset + lane * 4);
    for (int w = 0; w < 8; ++w) {
      const int64_t k = tile_k * kTileK + w * 8;
      if (k >= p.k) break;
      const uint32_t word = LoadStream32(record + (w / 4) * kHalfBytes + lane * 16 + (w % 4) * 4);
      float v[8];
      Values<kFloatScale>(word, scales, w / 2, v);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        v[i] = Scaled<kFloatScale>(p, v[i], __uint_as_float(scales), global);
      StoreEight(static_cast<float*>(p.out) + row * p.out_stride + k, v);
    }
  }
}

}  // namespace

cudaError_t LaunchDequantize(const DequantizeArgs& p, cudaStream_t stream) {
  const auto per_column = static_cast<unsigned>(CeilDiv(p.tiles_k, kWarps));
  const dim3 grid(static_cast<unsigned>(p.last_tile - p.first_tile),
                  per_column < 65535u ? per_column : 65535u);
  if (p.out_half) {
    (p.float_scale ? DequantizeHalf<true>
                   : DequantizeHalf<false>)<<<grid, kWarps * 32, 0, stream>>>(p);
  } else {
    (p.float_scale ? DequantizeFloat<true>
                   : DequantizeFloat<false>)<<<grid, kWarps * 32, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace nvfp4
