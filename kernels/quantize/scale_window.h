// The search of scale codes for a tile: errors under trial codes, and the best code of a window.
#ifndef NVFP4_QUANT_SCALE_WINDOW_H_
#define NVFP4_QUANT_SCALE_WINDOW_H_

#include "tile.h"
#include "weight_passes.h"

namespace nvfp4_quant {

using Lanes = float[kBlock][kLanes];  // [position in block][block]

// Squared error of every block under one scale code each, in units of (weight * divisor)^2;
// `weigh(e, lane, square)` gives what one square counts.
template <typename Weigh>
NVFP4_INLINE void SumErrors(const Lanes& scaled, const uint32_t* code, const Weigh& weigh,
                            float* error) {
  float value[kLanes];
  float reciprocal[kLanes];
  float sum[kLanes] = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    value[lane] = kScales.value[code[lane]];
    reciprocal[lane] = kScales.reciprocal[code[lane]];
  }
  for (int e = 0; e < kBlock; ++e) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float rounded = RoundE2m1(scaled[e][lane] * reciprocal[lane]);
      const float difference = scaled[e][lane] - rounded * value[lane];
      sum[lane] += weigh(e, lane, difference * difference);
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) error[lane] = sum[lane];
}

// Replaces each code by the best one of the window around it; `try_codes(code, error)` gives the
// errors. On a tie the code itself, then the lower one, stays.
template <typename Try>
NVFP4_INLINE void SweepWindow(const Try& try_codes, uint32_t* best_code) {
  int32_t base[kLanes];
  float best[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) base[lane] = static_cast<int32_t>(best_code[lane]);
  try_codes(best_code, best);
  for (int step = -kWindowBelow; step <= kWindowAbove; ++step) {
    if (step == 0) continue;
    uint32_t code[kLanes];
    float error[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const int32_t wanted = base[lane] + step;
      const int32_t low = wanted < 1 ? 1 : wanted;
      code[lane] = static_cast<uint32_t>(low > kMaxCode ? kMaxCode : low);
    }
    try_codes(code, error);
    for (int lane = 0; lane < kLanes; ++lane) {
      const bool better = error[lane] < best[lane];
      best[lane] = better ? error[lane] : best[lane];
      best_code[lane] = better ? code[lane] : best_code[lane];
    }
  }
}

}  // namespace nvfp4_quant

#endif  // NVFP4_QUANT_SCALE_WINDOW_H_
