// The plain decoder: what every other path of both libraries is compared with.
#include <cmath>

#include "host.h"

namespace nvfp4::host {

WeightRow RowOf(const nvfp4_weight& weight, int64_t expert, int64_t row) {
  const auto* codes = static_cast<const uint8_t*>(weight.codes);
  const auto* scales = static_cast<const uint8_t*>(weight.scales);
  const int64_t row_scales_bytes = weight.k / weight.group * TypeBytes(weight.scale_type);
  return {codes + expert * weight.codes_expert_bytes + row * (weight.k / 2),
          scales + expert * weight.scales_expert_bytes + row * row_scales_bytes, weight.scale_type,
          weight.group, weight.k};
}

float GlobalOf(const nvfp4_weight& weight, int64_t expert, int64_t row) {
  return weight
      .globals[expert * weight.globals_expert_bytes / static_cast<int64_t>(sizeof(float)) + row];
}

void DecodeUnscaled(const WeightRow& row, double* out) {
  double products[16] = {};
  for (int64_t block = 0; block < row.k / row.group; ++block) {
    const double scale = static_cast<double>(LoadScale(row.scale_type, row.scales, block));
    for (int code = 0; code < 16; ++code) {
      products[code] = static_cast<double>(kE2m1[code]) * scale;
    }
    const uint8_t* codes = row.codes + block * (row.group / 2);
    for (int pair = 0; pair < row.group / 2; ++pair) {
      *out++ = products[codes[pair] & 15U];
      *out++ = products[codes[pair] >> 4];
    }
  }
}

double Silu(double z) {
  // exp of a large positive argument would be infinite and the quotient still right (0); written so
  // that it never is.
  return z >= 0 ? z / (1.0 + std::exp(-z)) : z * std::exp(z) / (1.0 + std::exp(z));
}

}  // namespace nvfp4::host
