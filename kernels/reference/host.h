// What the files of the host library share: its layout, element access, and a loop over rows on
// threads.
#ifndef NVFP4_REFERENCE_HOST_H_
#define NVFP4_REFERENCE_HOST_H_

#include <cstdint>

#include "check.h"
#include "numbers.h"

namespace nvfp4::host {

// The packed form of this library is the canonical one: codes [n, k / 2], scales [n, k / group],
// globals [n], expert after expert.
inline constexpr LayoutId kLayout = {NVFP4_LAYOUT_HOST, 1};

// Workers of one call at most: a workspace is sized for them without knowing the machine.
inline constexpr int kMaxWorkers = 16;

// Threads of one call at most, where no workspace bounds them.
inline constexpr int kMaxThreads = 64;

// The workers a call over `rows` rows of `row_cost` elementary steps each is worth.
int WorkersFor(int64_t rows, int64_t row_cost, int limit);

// Calls body(context, worker, begin, end) for contiguous shares of 0 .. rows-1, one for each of
// `workers`, and waits for all. A share goes to the calling thread when no thread can be started.
void ForRowsErased(int64_t rows, int workers, void* context,
                   void (*body)(void* context, int worker, int64_t begin, int64_t end));

// ForRowsErased for a callable (int worker, int64_t begin, int64_t end) that does not throw.
template <typename Body>
void ForRows(int64_t rows, int workers, Body body) {
  ForRowsErased(rows, workers, &body, [](void* context, int worker, int64_t begin, int64_t end) {
    (*static_cast<Body*>(context))(worker, begin, end);
  });
}

// Element `index` of an array of FP16 or FP32.
inline float Load(int32_t type, const void* data, int64_t index) {
  return type == NVFP4_F16 ? HalfToFloat(static_cast<const uint16_t*>(data)[index])
                           : static_cast<const float*>(data)[index];
}

// Rounds once from FP64 to FP16 or FP32.
inline void Store(int32_t type, void* data, int64_t index, double value) {
  if (type == NVFP4_F16) {
    static_cast<uint16_t*>(data)[index] = DoubleToHalf(value);
  } else {
    static_cast<float*>(data)[index] = static_cast<float>(value);
  }
}

// Block scale `index` of an array of E4M3, FP16 or FP32.
inline float LoadScale(int32_t type, const void* scales, int64_t index) {
  return type == NVFP4_E4M3 ? E4m3ToFloat(static_cast<const uint8_t*>(scales)[index])
                            : Load(type, scales, index);
}

// One row of weights in canonical form.
struct WeightRow {
  const uint8_t* codes;
  const void* scales;
  int32_t scale_type;
  int32_t group;
  int64_t k;
};

// Row `row` of expert `expert`.
WeightRow RowOf(const nvfp4_weight& weight, int64_t expert, int64_t row);
float GlobalOf(const nvfp4_weight& weight, int64_t expert, int64_t row);

// What the global does to a value, with one rounding to FP64 at most.
inline double ApplyGlobal(int32_t global_kind, double value, float global) {
  return global_kind == NVFP4_GLOBAL_DIVISOR ? value / static_cast<double>(global)
                                             : value * static_cast<double>(global);
}

// Writes e2m1 * scale, without the global, as FP64; exact for every scale type. out has row.k
// elements.
void DecodeUnscaled(const WeightRow& row, double* out);

// silu(z) = z / (1 + exp(-z)), without overflow.
double Silu(double z);

}  // namespace nvfp4::host

#endif  // NVFP4_REFERENCE_HOST_H_
