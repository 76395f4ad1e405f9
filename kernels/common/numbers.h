// E2M1, E4M3 and FP16 on the host, exact and without tables of the standard library. Shared by both
// libraries and the tests.
#ifndef NVFP4_COMMON_NUMBERS_H_
#define NVFP4_COMMON_NUMBERS_H_

#include <cmath>
#include <cstdint>
#include <cstring>

namespace nvfp4 {

// OCP Microscaling Formats v1.0, section 5.3.3; bit 3 of a code is the sign, code 8 is -0.
inline constexpr float kE2m1[16] = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                    -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};

inline uint32_t FloatBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float BitsFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The value of an E4M3 "fn" code: 1-4-3 bits, bias 7, 0x7f and 0xff are NaN, no infinity.
inline float E4m3ToFloat(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80U) << 24;
  const uint32_t magnitude = code & 0x7fU;
  if (magnitude == 0x7fU) {
    return BitsFloat(sign | 0x7fc00000U);
  }
  if (magnitude < 8U) {  // subnormal: steps of 2^-9
    const float value = static_cast<float>(magnitude) * 0x1p-9F;
    return sign != 0 ? -value : value;
  }
  return BitsFloat(sign | ((magnitude << 20) + ((127U - 7U) << 23)));
}

inline float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000U) << 16;
  const uint32_t magnitude = half & 0x7fffU;
  if (magnitude >= 0x7c00U) {  // infinity and NaN keep their fraction
    return BitsFloat(sign | 0x7f800000U | ((magnitude & 0x3ffU) << 13));
  }
  if (magnitude < 0x400U) {
    const float value = static_cast<float>(magnitude) * 0x1p-24F;
    return sign != 0 ? -value : value;
  }
  return BitsFloat(sign | ((magnitude << 13) + ((127U - 15U) << 23)));
}

// Rounds to nearest, ties to even; 65520 and more give infinity, NaN stays a quiet NaN.
inline uint16_t FloatToHalf(float value) {
  const uint32_t bits = FloatBits(value);
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {
    return static_cast<uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x3ffU));
  }
  if (magnitude >= 0x477ff000U) {
    return static_cast<uint16_t>(sign | 0x7c00U);
  }
  if (magnitude < 0x38800000U) {
    // Below 2^-14 an FP16 step is 2^-24, which is the FP32 step of numbers in [0.5, 1): the
    // addition rounds for us.
    const float shifted = BitsFloat(magnitude) + 0.5F;
    return static_cast<uint16_t>(sign | (FloatBits(shifted) - FloatBits(0.5F)));
  }
  const uint32_t odd = (magnitude >> 13) & 1U;
  return static_cast<uint16_t>(sign | ((magnitude - ((127U - 15U) << 23) + 0xfffU + odd) >> 13));
}

// Rounds an FP64 value once to FP16: through an FP32 rounded to odd, which the second rounding
// cannot fall for.
inline uint16_t DoubleToHalf(double value) {
  float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  if (back != value && std::isfinite(nearest) && !std::isnan(value)) {
    uint32_t bits = FloatBits(nearest);
    if (std::fabs(back) > std::fabs(value)) {
      bits -= 1;  // truncate towards zero; `nearest` is not zero here
    }
    nearest = BitsFloat(bits | 1U);
  }
  return FloatToHalf(nearest);
}

}  // namespace nvfp4

#endif  // NVFP4_COMMON_NUMBERS_H_
