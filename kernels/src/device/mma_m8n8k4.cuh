// PTX wrapper of the Volta tensor-core product (PTX ISA, mma.m8n8k4): four independent 8x8x4
// products a warp, one a quadpair, FP16 operands, FP32 accumulators. Operand maps: layout/tile.h
// (RowOfLane, ColumnOfLane, Accumulator*).
#pragma once
#include <cstdint>

namespace nvfp4 {

// acc[8] += A (two registers: 4 k of one token row) x B (two registers: 4 k of one weight column).
__device__ __forceinline__ void MmaM8N8K4(float (&acc)[8], uint32_t a0, uint32_t a1, uint32_t b0,
                                          uint32_t b1) {
  asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%10,%11},"
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]),
        "+f"(acc[6]), "+f"(acc[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

}  // namespace nvfp4
