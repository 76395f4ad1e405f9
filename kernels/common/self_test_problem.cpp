#include "self_test_problem.h"

#include <cmath>
#include <cstring>

#include "numbers.h"
#include "nvfp4.h"

namespace nvfp4 {
namespace {

// Numerical Recipes' 32-bit linear congruential generator; its upper bits are used.
class Generator {
 public:
  explicit Generator(uint32_t seed) : state_(seed) {}
  // 0 .. limit-1.
  uint32_t Below(uint32_t limit) {
    state_ = state_ * 1664525U + 1013904223U;
    return (state_ >> 16) % limit;
  }

 private:
  uint32_t state_;
};

constexpr float kScales[3] = {0.5F, 1.0F, 2.0F};
constexpr uint8_t kE4m3Scales[3] = {0x30, 0x38, 0x40};

void AppendScale(int32_t type, uint32_t which, std::vector<uint8_t>* out) {
  if (type == NVFP4_E4M3) {
    out->push_back(kE4m3Scales[which]);
    return;
  }
  uint8_t bytes[4] = {};
  size_t count = sizeof(float);
  if (type == NVFP4_F16) {
    const uint16_t half = FloatToHalf(kScales[which]);
    count = sizeof(half);
    std::memcpy(bytes, &half, count);
  } else {
    std::memcpy(bytes, &kScales[which], count);
  }
  out->insert(out->end(), bytes, bytes + count);
}

float ScaleAt(const SelfTestWeight& weight, int64_t index) {
  const uint8_t* bytes = weight.scales.data();
  if (weight.scale_type == NVFP4_E4M3) {
    return E4m3ToFloat(bytes[index]);
  }
  if (weight.scale_type == NVFP4_F16) {
    uint16_t half = 0;
    std::memcpy(&half, bytes + index * 2, sizeof(half));
    return HalfToFloat(half);
  }
  float value = 0.0F;
  std::memcpy(&value, bytes + index * 4, sizeof(value));
  return value;
}

}  // namespace

const std::vector<SelfTestProblem>& SelfTestProblems() {
  constexpr int32_t kTimes = NVFP4_GLOBAL_MULTIPLIER;
  constexpr int32_t kOver = NVFP4_GLOBAL_DIVISOR;
  // One of each range of m that a chooser tells apart; n and k that need padding.
  static const std::vector<SelfTestProblem> problems = {
      {1, 33, 80, 16, NVFP4_E4M3, kTimes, 1, 1},    {8, 71, 192, 16, NVFP4_E4M3, kTimes, 1, 1},
      {9, 7, 1040, 16, NVFP4_E4M3, kOver, 1, 1},    {16, 64, 512, 16, NVFP4_E4M3, kTimes, 1, 1},
      {17, 96, 336, 16, NVFP4_E4M3, kTimes, 1, 1},  {32, 31, 256, 16, NVFP4_E4M3, kTimes, 1, 1},
      {65, 136, 320, 16, NVFP4_E4M3, kTimes, 1, 1}, {300, 48, 128, 16, NVFP4_E4M3, kTimes, 1, 1},
      {5, 40, 192, 32, NVFP4_E4M3, kTimes, 1, 1},   {5, 40, 192, 64, NVFP4_E4M3, kTimes, 1, 1},
      {5, 40, 384, 128, NVFP4_F16, kTimes, 1, 1},   {5, 40, 384, 128, NVFP4_F32, kTimes, 1, 1},
      {9, 48, 64, 16, NVFP4_E4M3, kTimes, 6, 2},    {70, 112, 80, 16, NVFP4_E4M3, kTimes, 6, 3},
  };
  return problems;
}

double SelfTestWeight::Unscaled(int64_t expert, int64_t row, int64_t column) const {
  const int64_t line = expert * n + row;
  const uint8_t pair = codes[static_cast<size_t>(line * (k / 2) + column / 2)];
  const unsigned code = column % 2 == 0 ? pair & 15U : static_cast<unsigned>(pair) >> 4;
  const float scale = ScaleAt(*this, line * (k / group) + column / group);
  return static_cast<double>(kE2m1[code]) * static_cast<double>(scale);
}

double SelfTestWeight::Factor(int64_t expert, int64_t row) const {
  const auto global = static_cast<double>(globals[static_cast<size_t>(expert * n + row)]);
  return global_kind == NVFP4_GLOBAL_DIVISOR ? 1.0 / global : global;
}

SelfTestWeight MakeSelfTestWeight(const SelfTestProblem& problem, int64_t n, int64_t k,
                                  uint32_t seed) {
  Generator random(seed);
  SelfTestWeight weight{
      problem.experts, n, k, problem.group, problem.scale_type, problem.global_kind, {}, {}, {}};
  for (int64_t i = 0; i < problem.experts * n * k / 2; ++i) {
    weight.codes.push_back(static_cast<uint8_t>(random.Below(256)));
  }
  for (int64_t i = 0; i < problem.experts * n * (k / problem.group); ++i) {
    AppendScale(problem.scale_type, random.Below(3), &weight.scales);
  }
  for (int64_t i = 0; i < problem.experts * n; ++i) {
    const int power = static_cast<int>(random.Below(3)) - 6;  // 2^-6 .. 2^-4
    const bool divides = problem.global_kind == NVFP4_GLOBAL_DIVISOR;
    weight.globals.push_back(std::ldexp(1.0F, divides ? -power : power));
  }
  return weight;
}

std::vector<uint16_t> MakeSelfTestRows(int64_t rows, int64_t columns, uint32_t seed) {
  Generator random(seed);
  std::vector<uint16_t> x;
  for (int64_t i = 0; i < rows * columns; ++i) {
    x.push_back(FloatToHalf(static_cast<float>(random.Below(5)) - 2.0F));
  }
  return x;
}

double SelfTestProduct(const SelfTestWeight& weight, int64_t expert, int64_t column,
                       const std::vector<uint16_t>& x, int64_t row) {
  double sum = 0.0;
  for (int64_t i = 0; i < weight.k; ++i) {
    const uint16_t half = x[static_cast<size_t>(row * weight.k + i)];
    sum += static_cast<double>(HalfToFloat(half)) * weight.Unscaled(expert, column, i);
  }
  return sum * weight.Factor(expert, column);
}

std::vector<int32_t> MakeSelfTestRouting(const SelfTestProblem& problem) {
  Generator random(77);
  std::vector<int32_t> ids;
  // The last expert stays empty; consecutive slots of a token differ.
  const auto used = static_cast<uint32_t>(problem.experts - 1);
  for (int64_t token = 0; token < problem.m; ++token) {
    const uint32_t first = random.Below(used);
    for (int64_t slot = 0; slot < problem.top_k; ++slot) {
      ids.push_back(static_cast<int32_t>((first + static_cast<uint32_t>(slot)) % used));
    }
  }
  ids.back() = -1;
  return ids;
}

std::vector<float> MakeSelfTestRoutingWeights(const SelfTestProblem& problem) {
  Generator random(78);
  std::vector<float> weights;
  for (int64_t i = 0; i < problem.m * problem.top_k; ++i) {
    weights.push_back(std::ldexp(1.0F, -static_cast<int>(random.Below(3))));
  }
  return weights;
}

}  // namespace nvfp4
