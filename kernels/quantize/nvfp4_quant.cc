// The quantizer: scan and encode over tiles, on as many threads as asked for. See nvfp4_quant.h.
#include "nvfp4_quant.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "scale_window.h"
#include "tile.h"
#include "weight_passes.h"

namespace nvfp4_quant {
namespace {

// Work unit of one thread. Sums are kept per unit and added in order, so they do not depend on
// timing.
constexpr int64_t kUnitWeights = int64_t{256} * kTileWeights;

struct Tile {
  Lanes weight;
  uint32_t code[kLanes];
  float error[kLanes];
  float energy[kLanes];
};

int ElementBytes(int dtype) { return dtype == NVFP4_QUANT_F32 ? 4 : 2; }

// Reads `count` weights as FP32 into `out`.
NVFP4_CLONES void Load(const unsigned char* source, int dtype, int64_t count, float* out) {
  if (dtype == NVFP4_QUANT_F32) {
    std::memcpy(out, source, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  uint16_t raw[kTileWeights];
  std::memcpy(raw, source, static_cast<size_t>(count) * sizeof(uint16_t));
  if (dtype == NVFP4_QUANT_F16) {
    for (int64_t i = 0; i < count; ++i) out[i] = FloatOfHalf(raw[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = FloatOfBfloat(raw[i]);
  }
}

NVFP4_CLONES void ScanTile(const float* weights, int64_t count, float* amax, int64_t* non_finite) {
  uint32_t largest = BitsOf(*amax);
  int64_t bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = BitsOf(weights[i]) & 0x7FFFFFFFu;
    const bool finite = magnitude < 0x7F800000u;
    bad += finite ? 0 : 1;
    // Positive floats order like their bits.
    const uint32_t candidate = finite ? magnitude : 0u;
    largest = candidate > largest ? candidate : largest;
  }
  *amax = FloatOf(largest);
  *non_finite += bad;
}

// The E4M3 code nearest to amax / 6 of each block, in the operation order of compressed-tensors.
NVFP4_CLONES void BaseCodes(Tile* tile, float divisor) {
  float amax[kLanes] = {};
  for (int e = 0; e < kBlock; ++e) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float magnitude = FloatOf(BitsOf(tile->weight[e][lane]) & 0x7FFFFFFFu);
      amax[lane] = magnitude > amax[lane] ? magnitude : amax[lane];
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const float scale = divisor * (amax[lane] / 6.0f);
    const uint32_t code = CodeE4m3(scale < 448.0f ? scale : 448.0f);
    tile->code[lane] = code == 0 ? static_cast<uint32_t>(kZeroBlockCode) : code;
  }
}

NVFP4_CLONES void TryCodes(const Lanes& scaled, const uint32_t* code, float* error) {
  SumErrors(scaled, code, [](int, int, float square) { return square; }, error);
}

NVFP4_CLONES void SweepCodes(Tile* tile, float divisor) {
  Lanes scaled;
  for (int e = 0; e < kBlock; ++e) {
    for (int lane = 0; lane < kLanes; ++lane) {
      scaled[e][lane] = FloatOf(BitsOf(tile->weight[e][lane]) & 0x7FFFFFFFu) * divisor;
    }
  }
  const auto try_codes = [&scaled](const uint32_t* code, float* error) {
    TryCodes(scaled, code, error);
  };
  SweepWindow(try_codes, tile->code);
}

// Writes the nibbles of the tile under its codes and the error they make. The divisions are those
// of compressed-tensors (scale / divisor, then weight / scale): a reciprocal would flip rare ties.
NVFP4_CLONES void EncodeTile(Tile* tile, float divisor, uint8_t (*nibble)[kLanes]) {
  float step[kLanes];
  float error[kLanes] = {};
  float energy[kLanes] = {};
  for (int lane = 0; lane < kLanes; ++lane) step[lane] = kScales.value[tile->code[lane]] / divisor;
  for (int e = 0; e < kBlock; ++e) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float weight = tile->weight[e][lane];
      const float quotient = weight / step[lane];
      const float magnitude = FloatOf(BitsOf(quotient) & 0x7FFFFFFFu);
      const float rounded = RoundE2m1(magnitude);
      // -0.0 gets no sign, a negative that rounds to zero does: as torch.sign and signbit have it.
      const uint32_t sign = quotient < 0.0f ? 8u : 0u;
      nibble[e][lane] = static_cast<uint8_t>(CodeE2m1(rounded) | sign);
      const float absolute = FloatOf(BitsOf(weight) & 0x7FFFFFFFu);
      const float difference = absolute - rounded * step[lane];
      error[lane] += difference * difference;
      energy[lane] += absolute * absolute;
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    tile->error[lane] = error[lane];
    tile->energy[lane] = energy[lane];
  }
}

struct Job {
  const unsigned char* weights;
  int dtype;
  int64_t count;
  float divisor;
  int mode;
  uint8_t* packed;
  uint8_t* scales;
};

// Puts `blocks` blocks of consecutive weights side by side; lanes without a block hold zeros.
void Transpose(const float* linear, int blocks, Tile* tile) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int e = 0; e < kBlock; ++e) {
      tile->weight[e][lane] = lane < blocks ? linear[lane * kBlock + e] : 0.0f;
    }
  }
}

void Store(const Job& job, int64_t first_block, int blocks, const Tile& tile,
           const uint8_t (*nibble)[kLanes]) {
  for (int lane = 0; lane < blocks; ++lane) {
    uint8_t* out = job.packed + (first_block + lane) * (kBlock / 2);
    for (int pair = 0; pair < kBlock / 2; ++pair) {
      out[pair] = static_cast<uint8_t>(nibble[2 * pair][lane] | (nibble[2 * pair + 1][lane] << 4));
    }
    job.scales[first_block + lane] = static_cast<uint8_t>(tile.code[lane]);
  }
}

struct Sums {
  double error = 0.0;
  double energy = 0.0;
};

Sums EncodeUnit(const Job& job, int64_t begin, int64_t end) {
  Sums sums;
  Tile tile;
  float linear[kTileWeights];
  uint8_t nibble[kBlock][kLanes];
  const int bytes = ElementBytes(job.dtype);
  for (int64_t at = begin; at < end; at += kTileWeights) {
    const int64_t weights = std::min<int64_t>(kTileWeights, end - at);
    const int blocks = static_cast<int>(weights / kBlock);
    Load(job.weights + at * bytes, job.dtype, weights, linear);
    Transpose(linear, blocks, &tile);
    BaseCodes(&tile, job.divisor);
    if (job.mode == NVFP4_QUANT_SWEEP) SweepCodes(&tile, job.divisor);
    EncodeTile(&tile, job.divisor, nibble);
    Store(job, at / kBlock, blocks, tile, nibble);
    for (int lane = 0; lane < blocks; ++lane) {
      sums.error += static_cast<double>(tile.error[lane]);
      sums.energy += static_cast<double>(tile.energy[lane]);
    }
  }
  return sums;
}

int64_t UnitCount(int64_t count) { return (count + kUnitWeights - 1) / kUnitWeights; }

bool KnownType(int dtype) { return dtype >= NVFP4_QUANT_F16 && dtype <= NVFP4_QUANT_F32; }

}  // namespace
}  // namespace nvfp4_quant

extern "C" {

int nvfp4_quant_abi_version(void) { return NVFP4_QUANT_ABI_VERSION; }

int nvfp4_quant_scan(const void* weights, int dtype, int64_t count, int threads, float* amax,
                     int64_t* non_finite) {
  using namespace nvfp4_quant;
  if (amax == nullptr || non_finite == nullptr || count < 0 || !KnownType(dtype)) {
    return NVFP4_QUANT_EINVAL;
  }
  *amax = 0.0f;
  *non_finite = 0;
  if (count == 0) return NVFP4_QUANT_OK;
  if (weights == nullptr) return NVFP4_QUANT_EINVAL;
  struct Found {
    float amax = 0.0f;
    int64_t non_finite = 0;
  };
  try {
    const auto* bytes = static_cast<const unsigned char*>(weights);
    std::vector<Found> found(static_cast<size_t>(UnitCount(count)));
    ForEachUnit(UnitCount(count), threads, [&](int64_t unit) {
      Found* mine = &found[static_cast<size_t>(unit)];
      const int64_t end = std::min(count, (unit + 1) * kUnitWeights);
      float linear[kTileWeights];
      for (int64_t at = unit * kUnitWeights; at < end; at += kTileWeights) {
        const int64_t length = std::min<int64_t>(kTileWeights, end - at);
        Load(bytes + at * ElementBytes(dtype), dtype, length, linear);
        ScanTile(linear, length, &mine->amax, &mine->non_finite);
      }
    });
    for (const Found& part : found) {
      *amax = std::max(*amax, part.amax);
      *non_finite += part.non_finite;
    }
  } catch (const std::bad_alloc&) {
    return NVFP4_QUANT_ENOMEM;
  }
  return NVFP4_QUANT_OK;
}

int nvfp4_quant_encode(const void* weights, int dtype, int64_t count, float divisor, int mode,
                       int threads, uint8_t* packed, uint8_t* scales, double* squared_error,
                       double* squared_weight) {
  using namespace nvfp4_quant;
  const bool known = KnownType(dtype) && (mode == NVFP4_QUANT_RTN || mode == NVFP4_QUANT_SWEEP);
  const bool sane = count >= 0 && count % kBlock == 0 && std::isfinite(divisor) && divisor > 0.0f;
  if (!known || !sane || squared_error == nullptr || squared_weight == nullptr) {
    return NVFP4_QUANT_EINVAL;
  }
  *squared_error = 0.0;
  *squared_weight = 0.0;
  if (count == 0) return NVFP4_QUANT_OK;
  if (weights == nullptr || packed == nullptr || scales == nullptr) return NVFP4_QUANT_EINVAL;
  try {
    const Job job{
        static_cast<const unsigned char*>(weights), dtype, count, divisor, mode, packed, scales};
    std::vector<Sums> sums(static_cast<size_t>(UnitCount(count)));
    ForEachUnit(UnitCount(count), threads, [&](int64_t unit) {
      const int64_t end = std::min(count, (unit + 1) * kUnitWeights);
      sums[static_cast<size_t>(unit)] = EncodeUnit(job, unit * kUnitWeights, end);
    });
    for (const Sums& part : sums) {
      *squared_error += part.error;
      *squared_weight += part.energy;
    }
  } catch (const std::bad_alloc&) {
    return NVFP4_QUANT_ENOMEM;
  }
  return NVFP4_QUANT_OK;
}

}  // extern "C"
