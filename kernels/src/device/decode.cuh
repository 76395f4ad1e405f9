// In-register decode of packed codes and scales (bit fields: layout/tile.h).
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "../layout/tile.h"

namespace nvfp4 {

// Stops the compiler from computing an address again from its parts in every step of a loop.
__device__ __forceinline__ void KeepInRegisters(const char*& address) { asm("" : "+l"(address)); }

// Weights are read once: .cg keeps them out of L1, where the activations live.
__device__ __forceinline__ uint4 LoadStream128(const void* address) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}
// For weights that other CTAs of the device read at about the same time: the read-only path.
__device__ __forceinline__ uint4 LoadCached128(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}
__device__ __forceinline__ uint32_t LoadStream32(const void* address) {
  uint32_t v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}

__device__ __forceinline__ uint32_t LoadStream16(const void* address) {
  uint16_t v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(address));
  return v;
}

__device__ __forceinline__ uint32_t MulHalf2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Eight codes of one word to four half2 registers (k 0,1 | 2,3 | 4,5 | 6,7), each value times
// 2^-14.
__device__ __forceinline__ void DecodeWord(uint32_t v, uint32_t (&out)[4]) {
  constexpr uint32_t kCode = 0x8E008E00u, kMagnitude = 0x0E000E00u, kSign = 0x80008000u;
  out[0] = v & kCode;
  out[1] = (v << 3) & kCode;
  out[2] = ((v << 6) & kMagnitude) | ((v << 1) & kSign);
  out[3] = ((v << 9) & kMagnitude) | ((v << 2) & kSign);
}

// The four E5M3 bytes of a scale word as halves: even = bytes 0 (low) and 2 (high), odd = bytes 1
// and 3.
struct ScalePair {
  uint32_t even, odd;
};
__device__ __forceinline__ ScalePair DecodeScales(uint32_t word) {
  return {(word << 7) & 0x7F807F80u, (word >> 1) & 0x7F807F80u};
}
// Scale of group g (0..3) in both halves of a register; ptxas folds the selection into the multiply
// (H0_H0 / H1_H1).
template <int G>
__device__ __forceinline__ uint32_t BroadcastScale(const ScalePair& s) {
  const uint32_t pair = (G & 1) ? s.odd : s.even;
  return __byte_perm(pair, pair, (G & 2) ? 0x3232 : 0x1010);
}

constexpr uint32_t kHalf2Pow14 = 0x74007400u;  // 2^14 in both halves

}  // namespace nvfp4
