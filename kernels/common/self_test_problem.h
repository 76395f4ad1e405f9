// Fixed problems whose right answers every correct library gives bit for bit, however it orders its
// sums.
#ifndef NVFP4_COMMON_SELF_TEST_PROBLEM_H_
#define NVFP4_COMMON_SELF_TEST_PROBLEM_H_

#include <cstdint>
#include <vector>

namespace nvfp4 {

// One problem; with experts > 1 it is a grouped product (gate/up, then down), else a dense one.
struct SelfTestProblem {
  int64_t m;
  int64_t n;  // dense: rows of the weight; grouped: the intermediate size
  int64_t k;
  int32_t group;
  int32_t scale_type;
  int32_t global_kind;
  int64_t experts;
  int64_t top_k;
};

const std::vector<SelfTestProblem>& SelfTestProblems();

// Canonical tensors of one weight [experts, n, k], contiguous. Scales and globals are powers of
// two.
struct SelfTestWeight {
  int64_t experts;
  int64_t n;
  int64_t k;
  int32_t group;
  int32_t scale_type;
  int32_t global_kind;
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;  // bytes of scale_type
  std::vector<float> globals;

  // Element [expert, row, column] without the global, and the global's effect as a factor.
  double Unscaled(int64_t expert, int64_t row, int64_t column) const;
  double Factor(int64_t expert, int64_t row) const;
};

SelfTestWeight MakeSelfTestWeight(const SelfTestProblem& problem, int64_t n, int64_t k,
                                  uint32_t seed);

// FP16 bits of [rows, columns] small integers, -2 .. 2.
std::vector<uint16_t> MakeSelfTestRows(int64_t rows, int64_t columns, uint32_t seed);

// Row `row` of x [.., k] times row `column` of one expert, exact in FP64.
double SelfTestProduct(const SelfTestWeight& weight, int64_t expert, int64_t column,
                       const std::vector<uint16_t>& x, int64_t row);

// Routed experts [m, top_k]: some experts get none, one pair is -1.
std::vector<int32_t> MakeSelfTestRouting(const SelfTestProblem& problem);
// Routing weights [m, top_k], powers of two.
std::vector<float> MakeSelfTestRoutingWeights(const SelfTestProblem& problem);

}  // namespace nvfp4

#endif  // NVFP4_COMMON_SELF_TEST_PROBLEM_H_
