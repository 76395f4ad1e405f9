// E2M1 codes under one FP16 scale a group: the group-128 form of QUASAR-ST. See nvfp4_quant.h.
#include <cmath>
#include <new>
#include <vector>

#include "nvfp4_quant.h"
#include "tile.h"
#include "weight_passes.h"

namespace nvfp4_quant {
namespace {

constexpr int kLargestGroup = 1024;
constexpr int kSums = 16;  // partial sums, added in order: one order for every vector width
constexpr int kCandidates = 41;
constexpr float kLowest = 0.60f;
constexpr float kStepOfCandidates = 0.0125f;
constexpr uint16_t kLargestHalf = 0x7BFF;

// Nearest FP16 of v >= 0, ties to even; above 65504 the bits of infinity.
uint16_t HalfOf(float v) {
  const uint32_t bits = BitsOf(v);
  if (v < 6.103515625e-05f) {  // below the smallest normal: multiples of 2^-24
    const float magic = 0.75f;  // 1.5 * 2^23 * 2^-24
    return static_cast<uint16_t>(BitsOf(v + magic) - BitsOf(magic));
  }
  const uint32_t rounded = bits + 0xFFFu + ((bits >> 13) & 1u);
  const uint32_t half = (rounded >> 13) - (112u << 10);
  return static_cast<uint16_t>(half > 0x7C00u ? 0x7C00u : half);
}

NVFP4_CLONES float SumOfErrors(const float* magnitude, int group, float scale) {
  float sum[kSums] = {};
  const float reciprocal = 1.0f / scale;
  for (int at = 0; at < group; at += kSums) {
    for (int i = 0; i < kSums; ++i) {
      const float rounded = RoundE2m1(magnitude[at + i] * reciprocal);
      const float difference = magnitude[at + i] - rounded * scale;
      sum[i] += difference * difference;
    }
  }
  float total = 0.0f;
  for (int i = 0; i < kSums; ++i) total += sum[i];
  return total;
}

struct GroupResult {
  double error = 0.0;
  double energy = 0.0;
  bool in_range = true;
};

uint16_t BestScale(const float* magnitude, int group, float amax) {
  uint16_t best = 0;
  float smallest = INFINITY;
  for (int i = 0; i < kCandidates; ++i) {
    const float factor = kLowest + kStepOfCandidates * static_cast<float>(i);
    const uint16_t half = HalfOf(amax / 6.0f * factor);
    if (half == 0 || half > kLargestHalf) continue;
    const float error = SumOfErrors(magnitude, group, FloatOfHalf(half));
    if (error < smallest) {
      smallest = error;
      best = half;
    }
  }
  return best;
}

GroupResult EncodeGroup(const float* weights, int group, uint8_t* packed, uint16_t* scale_bits) {
  GroupResult result;
  float magnitude[kLargestGroup];
  float amax = 0.0f;
  for (int i = 0; i < group; ++i) {
    magnitude[i] = std::fabs(weights[i]);
    amax = magnitude[i] > amax ? magnitude[i] : amax;
    result.energy += static_cast<double>(weights[i]) * static_cast<double>(weights[i]);
  }
  *scale_bits = BestScale(magnitude, group, amax);
  // Weights below what the smallest scale can express become zero; a scale too large does not fit.
  result.in_range = amax / 6.0f < 65520.0f;
  const float scale = FloatOfHalf(*scale_bits);
  for (int i = 0; i < group; i += 2) {
    uint32_t byte = 0;
    for (int half = 0; half < 2; ++half) {
      const float weight = weights[i + half];
      const float rounded = scale > 0.0f ? RoundE2m1(magnitude[i + half] / scale) : 0.0f;
      const uint32_t sign = weight < 0.0f && rounded > 0.0f ? 8u : 0u;
      byte |= (CodeE2m1(rounded) | sign) << (4 * half);
      const double difference = static_cast<double>(magnitude[i + half]) -
                                static_cast<double>(rounded) * static_cast<double>(scale);
      result.error += difference * difference;
    }
    packed[i / 2] = static_cast<uint8_t>(byte);
  }
  return result;
}

}  // namespace
}  // namespace nvfp4_quant

extern "C" {

int nvfp4_quant_groups(const float* weights, int64_t count, int group, int threads,
                       uint8_t* packed, uint16_t* scales, double* squared_error,
                       double* squared_weight) {
  using namespace nvfp4_quant;
  const bool sane = group >= kSums && group <= kLargestGroup && group % kSums == 0 && count >= 0 &&
                    count % group == 0;
  if (!sane || squared_error == nullptr || squared_weight == nullptr) return NVFP4_QUANT_EINVAL;
  *squared_error = 0.0;
  *squared_weight = 0.0;
  if (count == 0) return NVFP4_QUANT_OK;
  if (weights == nullptr || packed == nullptr || scales == nullptr) return NVFP4_QUANT_EINVAL;
  try {
    const int64_t groups = count / group;
    std::vector<GroupResult> results(static_cast<size_t>(groups));
    ForEachUnit(groups, threads, [&](int64_t i) {
      results[static_cast<size_t>(i)] =
          EncodeGroup(weights + i * group, group, packed + i * group / 2, scales + i);
    });
    bool in_range = true;
    for (const GroupResult& result : results) {
      *squared_error += result.error;
      *squared_weight += result.energy;
      in_range = in_range && result.in_range;
    }
    return in_range ? NVFP4_QUANT_OK : NVFP4_QUANT_ERANGE;
  } catch (const std::bad_alloc&) {
    return NVFP4_QUANT_ENOMEM;
  }
}

}  // extern "C"
