// Products of 16 x 16 tiles by mma.m8n8k4 (layout/operand.h), and loads of their operands.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "../layout/operand.h"
#include "mma_m8n8k4.cuh"

namespace nvfp4 {

// A k-contiguous, B k-strided.
__device__ __forceinline__ void MmaRowRow884(float (&acc)[8], uint32_t a0, uint32_t a1,
                                             const uint2& b) {
  asm("mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%10,%11},"
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]),
        "+f"(acc[6]), "+f"(acc[7])
      : "r"(a0), "r"(a1), "r"(b.x), "r"(b.y));
}

// Both k-strided.
__device__ __forceinline__ void MmaColRow884(float (&acc)[8], const uint2& a, const uint2& b) {
  asm("mma.sync.aligned.m8n8k4.col.row.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%10,%11},"
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]),
        "+f"(acc[6]), "+f"(acc[7])
      : "r"(a.x), "r"(a.y), "r"(b.x), "r"(b.y));
}

// Eight k of both k-contiguous operands: two steps.
__device__ __forceinline__ void MmaTile8(float (&acc)[8], const uint4& a, const uint4& b) {
  MmaM8N8K4(acc, a.x, a.y, b.x, b.y);
  MmaM8N8K4(acc, a.z, a.w, b.z, b.w);
}

__device__ __forceinline__ uint4 Load128(const __half* from) {
  return *reinterpret_cast<const uint4*>(from);
}
__device__ __forceinline__ uint2 Load64(const __half* from) {
  return *reinterpret_cast<const uint2*>(from);
}

// Eight halves times one factor: exact where it is a power of two.
__device__ __forceinline__ uint4 ScaleHalves(const uint4& raw, __half2 factor) {
  uint4 out;
  const auto* in = reinterpret_cast<const __half2*>(&raw);
  auto* to = reinterpret_cast<__half2*>(&out);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = __hmul2(in[i], factor);
  return out;
}

}  // namespace nvfp4
