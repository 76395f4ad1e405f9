// Routing: softmax over the experts and the largest few.
#include <cmath>
#include <limits>

#include "host.h"

namespace nvfp4::host {
namespace {

struct Row {
  int32_t type;
  const void* logits;
  int64_t first;
  int64_t experts;

  double At(int64_t expert) const {
    return static_cast<double>(Load(type, logits, first + expert));
  }
};

// The sum of exp(logit - largest); NaN if the softmax of the row has no value (a NaN, an infinity,
// or every logit -infinity).
double Denominator(const Row& row, double* largest) {
  *largest = -std::numeric_limits<double>::infinity();
  for (int64_t expert = 0; expert < row.experts; ++expert) {
    if (std::isnan(row.At(expert))) {
      return std::numeric_limits<double>::quiet_NaN();
    }
    *largest = std::fmax(*largest, row.At(expert));
  }
  double sum = 0.0;
  for (int64_t expert = 0; expert < row.experts; ++expert) {
    sum += std::exp(row.At(expert) - *largest);
  }
  return sum;
}

// Whether `expert` is already among the first `count` ids.
bool IsTaken(const int32_t* ids, int64_t count, int64_t expert) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] == expert) {
      return true;
    }
  }
  return false;
}

// The largest logit that is not taken; the lowest expert among equals.
int32_t NextLargest(const Row& row, const int32_t* ids, int64_t count) {
  int64_t best = -1;
  for (int64_t expert = 0; expert < row.experts; ++expert) {
    if (!IsTaken(ids, count, expert) && (best < 0 || row.At(expert) > row.At(best))) {
      best = expert;
    }
  }
  return static_cast<int32_t>(best);
}

void RouteInvalid(int64_t top_k, int32_t* ids, float* weights) {
  for (int64_t i = 0; i < top_k; ++i) {
    ids[i] = static_cast<int32_t>(i);
    weights[i] = std::numeric_limits<float>::quiet_NaN();
  }
}

void Route(const Row& row, int64_t top_k, bool renormalize, int32_t* ids, float* weights) {
  double largest = 0.0;
  const double denominator = Denominator(row, &largest);
  if (std::isnan(denominator)) {
    RouteInvalid(top_k, ids, weights);
    return;
  }
  double sum = 0.0;
  for (int64_t i = 0; i < top_k; ++i) {
    ids[i] = NextLargest(row, ids, i);
    sum += std::exp(row.At(ids[i]) - largest);
  }
  const double divisor = renormalize ? sum : denominator;
  for (int64_t i = 0; i < top_k; ++i) {
    weights[i] = static_cast<float>(std::exp(row.At(ids[i]) - largest) / divisor);
  }
}

}  // namespace
}  // namespace nvfp4::host

extern "C" nvfp4_status nvfp4_topk_softmax(int32_t logits_type, int64_t m, int64_t experts,
                                           int64_t top_k, const void* logits, int64_t logits_stride,
                                           int32_t renormalize, int32_t* ids, float* weights,
                                           void* /*stream*/) {
  using namespace nvfp4;
  using namespace nvfp4::host;
  NVFP4_TRY(CheckTopK(logits_type, m, experts, top_k, {"logits", logits, logits_stride, experts},
                      ids, weights));
  ForRows(m, WorkersFor(m, experts * top_k, kMaxThreads), [&](int, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Route({logits_type, logits, row * logits_stride, experts}, top_k, renormalize != 0,
            ids + row * top_k, weights + row * top_k);
    }
  });
  return NVFP4_OK;
}
