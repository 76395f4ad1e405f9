// What the attention kernels share: the second form of the tensor-core product, keys of the paged
// cache, weights of the softmax.
//
// Weights. A weight is exp2(score * scale * log2(e) - largest + kWeightShift): FP16 holds it at
// full precision down to 2^-21 of the largest one, and the shift leaves the result with the sum of
// weights.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "../attention_args.h"
#include "../layout/tile.h"
#include "mma_m8n8k4.cuh"

namespace nvfp4 {

constexpr float kWeightShift = 7.0f;
// Sums are scaled anew when a score is this much (log2) above the largest one so far: a weight then
// stays below 2^15.
constexpr float kLazyScale = 8.0f;
constexpr float kNoScore = -1e30f;  // below every score, and finite: differences stay numbers
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// acc[8] += A (two registers: 4 k of one row) x B, row-major: lane holds row lane & 3, columns 4 *
// (lane >= 16) + 0 .. 3.
__device__ __forceinline__ void MmaRowRow(float (&acc)[8], uint32_t a0, uint32_t a1, uint32_t b0,
                                          uint32_t b1) {
  asm("mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%10,%11},"
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]),
        "+f"(acc[6]), "+f"(acc[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t PackHalves(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// 16 bytes of the cache, or zeros. Nobody writes the cache while a kernel reads it. Volatile: a
// load stays where the source has it, or the compiler keeps more of them in flight than registers
// hold.
__device__ __forceinline__ uint4 LoadKeys128(const __half* address, bool is_there) {
  uint4 v;
  asm volatile(
      "{\n .reg .pred there;\n setp.ne.u32 there, %5, 0;\n mov.u32 %0, 0;\n mov.u32 %1, 0;\n"
      " mov.u32 %2, 0;\n mov.u32 %3, 0;\n @there ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(address), "r"(static_cast<uint32_t>(is_there)));
  return v;
}

// The keys of one KV head of one sequence.
struct PagedKeys {
  const int32_t* table;
  int64_t head_offset;

  __device__ __forceinline__ PagedKeys(const AttentionArgs& p, int sequence, int head)
      : table(p.block_table + sequence * p.block_table_stride),
        head_offset(head * p.cache_head_stride) {}

  // Block of a unit of 16 keys in the table.
  static __device__ __forceinline__ int BlockOf(const AttentionArgs& p, int unit) {
    return static_cast<int>(__umulhi(2u * static_cast<uint32_t>(unit), p.divider.magic) >>
                            p.divider.shift);
  }
  // Elements from the start of a cache to the first key of a unit, whose block lies at `id`.
  __device__ __forceinline__ int64_t OffsetOf(const AttentionArgs& p, int unit, int block,
                                              int id) const {
    const int within = unit * kUnitKeys - block * p.block_size;
    return head_offset + id * p.cache_block_stride +
           static_cast<int64_t>(within) * p.cache_token_stride;
  }
};

// Keys that one or more queries of a sequence see: first .. last - 1. `position` is that of the
// first query, `count` how many there are.
struct KeyRange {
  int first, last;
  __device__ __forceinline__ KeyRange(const AttentionArgs& p, int position, int count)
      : first(max(position - p.window + 1, 0)), last(position + count) {}
};

// The share of one split of the keys, in steps.
struct KeySplit {
  int first, last, used;  // `used` splits have keys
  __device__ __forceinline__ KeySplit(const KeyRange& keys, int step_keys, int splits, int split) {
    const int begin = keys.first / step_keys, end = (keys.last + step_keys - 1) / step_keys;
    const int each = max((end - begin + splits - 1) / splits, kLeastSteps);
    used = (end - begin + each - 1) / each;
    first = begin + split * each;
    last = min(first + each, end);
  }
  // The first split of queries without keys still has zeros to write.
  __device__ __forceinline__ bool HasNothing(int split) const {
    return first >= (split > 0 ? last : INT32_MAX);
  }
};

}  // namespace nvfp4
