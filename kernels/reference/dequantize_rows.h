// Fast decoding of one row to FP32 or FP16, in a portable and an AVX2 form with the same bits.
#ifndef NVFP4_REFERENCE_DEQUANTIZE_ROWS_H_
#define NVFP4_REFERENCE_DEQUANTIZE_ROWS_H_

#include "host.h"

namespace nvfp4::host {

// How the global of a row enters a value.
enum class GlobalUse { kNone, kMultiply, kDivide };

// The eight products a block's codes can give, without signs: magnitudes[i] = e2m1(i) * scale (* or
// / global), rounded once to FP32.
struct BlockTable {
  float magnitudes[8];
};

BlockTable TableOf(const WeightRow& row, int64_t block, GlobalUse use, float global);

// Writes row.k elements of `out_type` (NVFP4_F16 or NVFP4_F32) with the fastest form this processor
// has.
void DequantizeRow(const WeightRow& row, GlobalUse use, float global, int32_t out_type, void* out);

// The two forms; the second needs a processor for which HasAvx2() holds.
void DequantizeRowPortable(const WeightRow& row, GlobalUse use, float global, int32_t out_type,
                           void* out);
bool HasAvx2();
void DequantizeRowAvx2(const WeightRow& row, GlobalUse use, float global, int32_t out_type,
                       void* out);

}  // namespace nvfp4::host

#endif  // NVFP4_REFERENCE_DEQUANTIZE_ROWS_H_
