// RMSNorm, with or without the residual addition in front.
#include <cmath>

#include "host.h"

namespace nvfp4::host {
namespace {

double Summand(const nvfp4_norm& norm, int64_t row, int64_t i) {
  const auto x = static_cast<double>(Load(norm.io_type, norm.x, row * norm.x_stride + i));
  if (norm.residual == nullptr) {
    return x;
  }
  return x + static_cast<double>(Load(norm.io_type, norm.residual, row * norm.residual_stride + i));
}

void NormRow(const nvfp4_norm& norm, int64_t row) {
  double squares = 0.0;
  for (int64_t i = 0; i < norm.hidden; ++i) {
    const double value = Summand(norm, row, i);
    squares += value * value;
  }
  const double mean = squares / static_cast<double>(norm.hidden);
  const double inverse = 1.0 / std::sqrt(mean + static_cast<double>(norm.eps));
  for (int64_t i = 0; i < norm.hidden; ++i) {
    const double value = Summand(norm, row, i);
    const double gain = static_cast<double>(Load(norm.weight_type, norm.weight, i)) +
                        static_cast<double>(norm.weight_offset);
    if (norm.residual != nullptr) {
      Store(norm.io_type, norm.residual, row * norm.residual_stride + i, value);
    }
    Store(norm.io_type, norm.y, row * norm.y_stride + i, value * inverse * gain);
  }
}

}  // namespace
}  // namespace nvfp4::host

extern "C" nvfp4_status nvfp4_rms_norm(const nvfp4_norm* norm, void* /*stream*/) {
  using namespace nvfp4;
  using namespace nvfp4::host;
  NVFP4_TRY(CheckNorm(norm));
  const int workers = WorkersFor(norm->rows, norm->hidden, kMaxThreads);
  ForRows(norm->rows, workers, [&](int, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      NormRow(*norm, row);
    }
  });
  return NVFP4_OK;
}
