// Scratch memory and the inner product of the host library's matmul and grouped products.
#ifndef NVFP4_REFERENCE_PRODUCT_H_
#define NVFP4_REFERENCE_PRODUCT_H_

#include <algorithm>

#include "host.h"

namespace nvfp4::host {

// Rows of x that share one decoded row of the weight.
inline constexpr int64_t kTileRows = 8;

// FP64 rows of k elements for one worker.
struct Scratch {
  double* w;  // [k]
  double* x;  // [rows, k]
};

inline int64_t WorkerBytes(int64_t k, int64_t rows) {
  return (rows + 1) * k * static_cast<int64_t>(sizeof(double));
}

// Fewer workers for a very long k, so that the workspace stays within the limit of the ABI.
inline int ScratchWorkers(int64_t k, int64_t rows) {
  const int64_t fitting = NVFP4_WORKSPACE_LIMIT_BYTES / WorkerBytes(k, rows);
  return static_cast<int>(std::clamp<int64_t>(fitting, 1, kMaxWorkers));
}

inline int64_t ScratchBytes(int64_t k, int64_t rows) {
  return ScratchWorkers(k, rows) * WorkerBytes(k, rows);
}

inline Scratch ScratchOf(void* workspace, int worker, int64_t k, int64_t rows) {
  double* first = static_cast<double*>(workspace) + worker * (rows + 1) * k;
  return {first, first + k};
}

// Copies k elements of FP16 or FP32 as FP64.
inline void Widen(int32_t type, const void* x, int64_t offset, int64_t k, double* out) {
  for (int64_t i = 0; i < k; ++i) {
    out[i] = static_cast<double>(Load(type, x, offset + i));
  }
}

// The FP64 sum over k of x * w; k is a multiple of 16. Eight partial sums in a fixed order: the
// same bits on every machine, and room for the processor to overlap them.
inline double Dot(const double* x, const double* w, int64_t k) {
  double sums[8] = {};
  for (int64_t i = 0; i < k; i += 8) {
    for (int lane = 0; lane < 8; ++lane) {
      sums[lane] += x[i + lane] * w[i + lane];
    }
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

}  // namespace nvfp4::host

#endif  // NVFP4_REFERENCE_PRODUCT_H_
