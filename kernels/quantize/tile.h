// Arithmetic of one tile: kLanes blocks side by side, one block a SIMD lane.
//
// Every loop over lanes is independent per lane and is left to the compiler's vectorizer. Sums run
// over the 16 weights of a block in order, products and sums are rounded separately
// (-ffp-contract=off), so any vector width gives the same bits.
#ifndef NVFP4_QUANT_TILE_H_
#define NVFP4_QUANT_TILE_H_

#include <cstdint>
#include <cstring>

namespace nvfp4_quant {

constexpr int kBlock = 16;
constexpr int kLanes = 32;
constexpr int kTileWeights = kBlock * kLanes;
constexpr int kMaxCode = 0x7E;  // 448
constexpr int kZeroBlockCode =
    0x20;  // 0.125: what compressed-tensors writes where a scale rounds to 0
constexpr int kWindowBelow = 9;
constexpr int kWindowAbove = 7;

#define NVFP4_INLINE static inline __attribute__((always_inline))

NVFP4_INLINE uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

NVFP4_INLINE float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Rounds y in [0, inf) to the nearest E2M1 magnitude, ties to the even mantissa, saturating at 6.
// The step is half the power of two at or below y (0.5 under 2); adding 1.5 * 2^23 steps leaves no
// bits below one step, so the FP32 adder does the rounding.
NVFP4_INLINE float RoundE2m1(float y) {
  const float bounded = y < 6.0f ? y : 6.0f;
  const float at_least_one = bounded > 1.0f ? bounded : 1.0f;
  const float power = FloatOf(BitsOf(at_least_one) & 0x7F800000u);
  const float magic = power * 6291456.0f;  // 1.5 * 2^22
  return (bounded + magic) - magic;
}

// The 3-bit code of an E2M1 magnitude: 0, .5, 1, 1.5, 2, 3, 4, 6 -> 0..7.
NVFP4_INLINE uint32_t CodeE2m1(float magnitude) {
  // From 1 up, exponent and top mantissa bit of FP32 count the codes; 0 and .5 are the subnormals.
  const uint32_t normal = (BitsOf(magnitude) >> 22) - ((127u << 1) - 2u);
  const uint32_t subnormal = magnitude > 0.25f ? 1u : 0u;
  return magnitude < 1.0f ? subnormal : normal;
}

// Nearest E4M3 code of v in [0, 448], ties to even. Under 2^-6 the codes are multiples of 2^-9.
NVFP4_INLINE uint32_t CodeE4m3(float v) {
  const uint32_t bits = BitsOf(v);
  const uint32_t normal = ((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  const float magic = 24576.0f;  // 1.5 * 2^23 * 2^-9
  const uint32_t subnormal = BitsOf(v + magic) - BitsOf(magic);
  return v < 0.015625f ? subnormal : normal;
}

// Value of an E4M3 code 0x00..0x7E.
NVFP4_INLINE float ValueE4m3(uint32_t code) {
  const float normal = FloatOf((code << 20) + (120u << 23));
  const float subnormal = static_cast<float>(code) * 0.001953125f;  // 2^-9
  return code < 8u ? subnormal : normal;
}

// FP16 bits to FP32 without subnormal intermediates, so that flush-to-zero modes change nothing.
// Infinities and NaNs come out as they are.
NVFP4_INLINE float FloatOfHalf(uint16_t half) {
  const uint32_t magnitude = (half & 0x7FFFu) << 13;
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rebias = magnitude >= (31u << 23) ? (224u << 23) : (112u << 23);
  const uint32_t normal = magnitude + rebias;
  const float subnormal = FloatOf(magnitude + (113u << 23)) - FloatOf(113u << 23);
  return FloatOf((magnitude < (1u << 23) ? BitsOf(subnormal) : normal) | sign);
}

NVFP4_INLINE float FloatOfBfloat(uint16_t bits) {
  return FloatOf(static_cast<uint32_t>(bits) << 16);
}

}  // namespace nvfp4_quant

#endif  // NVFP4_QUANT_TILE_H_
