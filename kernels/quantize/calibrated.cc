// What calibration needs: block scales by weighted error, and GPTQ's pass over a panel of columns.
// See nvfp4_quant.h.
#include <cmath>
#include <new>
#include <vector>

#include "nvfp4_quant.h"
#include "scale_window.h"
#include "tile.h"
#include "weight_passes.h"

namespace nvfp4_quant {
namespace {

constexpr int64_t kWidestPanel = 1024;
constexpr int64_t kRowsPerUnit = 16;

// Weighted squared error of every block under one scale code each.
NVFP4_CLONES void TryWeighted(const Lanes& scaled, const Lanes& importance, const uint32_t* code,
                              float* error) {
  SumErrors(
      scaled, code,
      [&importance](int e, int lane, float square) { return importance[e][lane] * square; }, error);
}

// The code nearest to amax / 6 of each block of magnitudes that are multiplied by the divisor.
NVFP4_CLONES void NearestCodes(const Lanes& scaled, uint32_t* code) {
  float amax[kLanes] = {};
  for (int e = 0; e < kBlock; ++e) {
    for (int lane = 0; lane < kLanes; ++lane) {
      amax[lane] = scaled[e][lane] > amax[lane] ? scaled[e][lane] : amax[lane];
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const float scale = amax[lane] / 6.0f;
    const uint32_t nearest = CodeE4m3(scale < 448.0f ? scale : 448.0f);
    code[lane] = nearest == 0 ? static_cast<uint32_t>(kZeroBlockCode) : nearest;
  }
}

NVFP4_CLONES void BestCodes(const Lanes& scaled, const Lanes& importance, uint32_t* best_code) {
  NearestCodes(scaled, best_code);
  const auto try_codes = [&](const uint32_t* code, float* error) {
    TryWeighted(scaled, importance, code, error);
  };
  SweepWindow(try_codes, best_code);
}

// One row; `importance` holds [position in block][block] of every tile of the row.
void ScaleRow(const float* row, int64_t blocks, float divisor, const float* importance,
              uint8_t* scales) {
  for (int64_t first = 0; first < blocks; first += kLanes) {
    Lanes scaled;
    uint32_t code[kLanes];
    const int64_t used = std::min<int64_t>(kLanes, blocks - first);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      for (int e = 0; e < kBlock; ++e) {
        scaled[e][lane] =
            lane < used ? std::fabs(row[(first + lane) * kBlock + e]) * divisor : 0.0f;
      }
    }
    BestCodes(scaled, *reinterpret_cast<const Lanes*>(importance + first * kBlock), code);
    for (int64_t lane = 0; lane < used; ++lane) {
      scales[first + lane] = static_cast<uint8_t>(code[lane]);
    }
  }
}

// importance [columns] as ScaleRow wants it, zeros behind the last block.
std::vector<float> Transposed(const float* importance, int64_t columns) {
  const int64_t tiles = (columns + kTileWeights - 1) / kTileWeights;
  std::vector<float> out(static_cast<size_t>(tiles * kTileWeights), 0.0f);
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t tile = column / kTileWeights;
    const int64_t lane = column % kTileWeights / kBlock;
    const int64_t e = column % kBlock;
    out[static_cast<size_t>(tile * kTileWeights + e * kLanes + lane)] = importance[column];
  }
  return out;
}

// One row of a panel. Products and sums are rounded apart and no sum runs over columns in another
// order, so the bits do not depend on the vector width.
NVFP4_CLONES void PanelRow(float* row, const float* step, int64_t width, const float* factor,
                           uint8_t* code, float* error) {
  for (int64_t j = 0; j < width; ++j) {
    const float wanted = row[j];
    const float quotient = wanted / step[j];
    const float magnitude = RoundE2m1(std::fabs(quotient));
    const bool negative = quotient < 0.0f && magnitude > 0.0f;
    const float rounded = (negative ? -magnitude : magnitude) * step[j];
    const float* factors = factor + j * width;
    const float carried = (wanted - rounded) / factors[j];
    code[j] = static_cast<uint8_t>(CodeE2m1(magnitude) | (negative ? 8u : 0u));
    error[j] = carried;
    row[j] = rounded;
    for (int64_t k = j + 1; k < width; ++k) row[k] -= carried * factors[k];
  }
}

}  // namespace
}  // namespace nvfp4_quant

extern "C" {

int nvfp4_quant_scales(const float* weights, int64_t rows, int64_t columns, float divisor,
                       const float* importance, int threads, uint8_t* scales) {
  using namespace nvfp4_quant;
  const bool sane = rows >= 0 && columns >= 0 && columns % kBlock == 0 && std::isfinite(divisor) &&
                    divisor > 0.0f;
  if (!sane) return NVFP4_QUANT_EINVAL;
  if (rows == 0 || columns == 0) return NVFP4_QUANT_OK;
  if (weights == nullptr || importance == nullptr || scales == nullptr) return NVFP4_QUANT_EINVAL;
  try {
    const std::vector<float> tiles = Transposed(importance, columns);
    const int64_t blocks = columns / kBlock;
    ForEachUnit(rows, threads, [&](int64_t row) {
      ScaleRow(weights + row * columns, blocks, divisor, tiles.data(), scales + row * blocks);
    });
  } catch (const std::bad_alloc&) {
    return NVFP4_QUANT_ENOMEM;
  }
  return NVFP4_QUANT_OK;
}

int nvfp4_quant_panel(float* weights, const float* steps, int64_t rows, int64_t width,
                      const float* factor, int threads, uint8_t* codes, float* errors) {
  using namespace nvfp4_quant;
  if (rows < 0 || width < 0 || width > kWidestPanel) return NVFP4_QUANT_EINVAL;
  if (rows == 0 || width == 0) return NVFP4_QUANT_OK;
  if (weights == nullptr || steps == nullptr || factor == nullptr || codes == nullptr ||
      errors == nullptr) {
    return NVFP4_QUANT_EINVAL;
  }
  try {
    const int64_t units = (rows + kRowsPerUnit - 1) / kRowsPerUnit;
    ForEachUnit(units, threads, [&](int64_t unit) {
      const int64_t end = std::min(rows, (unit + 1) * kRowsPerUnit);
      for (int64_t at = unit * kRowsPerUnit * width; at < end * width; at += width) {
        PanelRow(weights + at, steps + at, width, factor, codes + at, errors + at);
      }
    });
  } catch (const std::bad_alloc&) {
    return NVFP4_QUANT_ENOMEM;
  }
  return NVFP4_QUANT_OK;
}

}  // extern "C"
