// The AVX2 form. Compiled for the base processor; only functions with the target attribute below
// use AVX2, so nothing inline from a header can leak AVX2 code into the rest of the library.
#include "dequantize_rows.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <array>

#define NVFP4_AVX2 __attribute__((target("avx2,f16c")))

namespace nvfp4::host {
namespace {

std::array<float, 256> AllE4m3() {
  std::array<float, 256> values = {};
  for (size_t code = 0; code < values.size(); ++code) {
    values[code] = E4m3ToFloat(static_cast<uint8_t>(code));
  }
  return values;
}

// A load in place of the branches of E4m3ToFloat: they cost as much as the rest of a block of 16.
const std::array<float, 256> kE4m3 = AllE4m3();

// 16 code bytes in k order from 8 packed bytes.
NVFP4_AVX2 inline __m128i Unpack16(const uint8_t* codes) {
  const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(packed, mask);
  const __m128i high = _mm_and_si128(_mm_srli_epi16(packed, 4), mask);
  return _mm_unpacklo_epi8(low, high);
}

// The lane permutation looks at the low three bits of an index only; bit 3 becomes the sign.
NVFP4_AVX2 inline __m256 Lookup8(__m256 table, __m128i codes) {
  const __m256i index = _mm256_cvtepu8_epi32(codes);
  const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(index, 3), 31);
  return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, index), _mm256_castsi256_ps(sign));
}

NVFP4_AVX2 inline void WriteFloats(__m256 table, const uint8_t* codes, int32_t group, float* out) {
  for (int32_t i = 0; i < group; i += 16) {
    const __m128i indices = Unpack16(codes + i / 2);
    _mm256_storeu_ps(out + i, Lookup8(table, indices));
    _mm256_storeu_ps(out + i + 8, Lookup8(table, _mm_srli_si128(indices, 8)));
  }
}

NVFP4_AVX2 inline void WriteHalves(__m256 table, const uint8_t* codes, int32_t group,
                                   uint16_t* out) {
  const __m128i halves = _mm256_cvtps_ph(table, _MM_FROUND_TO_NEAREST_INT);
  // Low bytes of the eight halves, then high bytes; the codes from 8 have the sign bit in the high
  // byte.
  const __m128i planes =
      _mm_shuffle_epi8(halves, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  const __m128i low = _mm_unpacklo_epi64(planes, planes);
  const __m128i high = _mm_or_si128(_mm_unpackhi_epi64(planes, planes),
                                    _mm_set_epi64x(INT64_C(-0x7f7f7f7f7f7f7f80), 0));
  for (int32_t i = 0; i < group; i += 16) {
    const __m128i indices = Unpack16(codes + i / 2);
    const __m128i low_bytes = _mm_shuffle_epi8(low, indices);
    const __m128i high_bytes = _mm_shuffle_epi8(high, indices);
    auto* target = reinterpret_cast<__m128i*>(out + i);
    _mm_storeu_si128(target, _mm_unpacklo_epi8(low_bytes, high_bytes));
    _mm_storeu_si128(target + 1, _mm_unpackhi_epi8(low_bytes, high_bytes));
  }
}

// The table in FP32 arithmetic: for E4M3 and FP16 scales code * scale is exact there, so one
// rounding is left as in TableOf.
template <GlobalUse kUse>
NVFP4_AVX2 inline __m256 TableAvx2(float scale, __m256 global) {
  const __m256 products = _mm256_mul_ps(_mm256_loadu_ps(kE2m1), _mm256_set1_ps(scale));
  if constexpr (kUse == GlobalUse::kMultiply) {
    return _mm256_mul_ps(products, global);
  } else if constexpr (kUse == GlobalUse::kDivide) {
    return _mm256_div_ps(products, global);
  } else {
    return products;
  }
}

template <GlobalUse kUse>
NVFP4_AVX2 inline __m256 TableOfBlock(const WeightRow& row, int64_t block, float global) {
  if (row.scale_type == NVFP4_F32) {
    return _mm256_loadu_ps(TableOf(row, block, kUse, global).magnitudes);
  }
  const float scale = row.scale_type == NVFP4_E4M3
                          ? kE4m3[static_cast<const uint8_t*>(row.scales)[block]]
                          : LoadScale(row.scale_type, row.scales, block);
  return TableAvx2<kUse>(scale, _mm256_set1_ps(global));
}

template <GlobalUse kUse>
NVFP4_AVX2 void DecodeRow(const WeightRow& row, float global, int32_t out_type, void* out) {
  for (int64_t block = 0; block < row.k / row.group; ++block) {
    const __m256 table = TableOfBlock<kUse>(row, block, global);
    const uint8_t* codes = row.codes + block * (row.group / 2);
    const int64_t first = block * row.group;
    if (out_type == NVFP4_F32) {
      WriteFloats(table, codes, row.group, static_cast<float*>(out) + first);
    } else {
      WriteHalves(table, codes, row.group, static_cast<uint16_t*>(out) + first);
    }
  }
}

}  // namespace

bool HasAvx2() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0;
}

void DequantizeRowAvx2(const WeightRow& row, GlobalUse use, float global, int32_t out_type,
                       void* out) {
  switch (use) {
    case GlobalUse::kNone:
      DecodeRow<GlobalUse::kNone>(row, global, out_type, out);
      break;
    case GlobalUse::kMultiply:
      DecodeRow<GlobalUse::kMultiply>(row, global, out_type, out);
      break;
    case GlobalUse::kDivide:
      DecodeRow<GlobalUse::kDivide>(row, global, out_type, out);
      break;
  }
}

}  // namespace nvfp4::host

#else  // other processors have the portable form only

namespace nvfp4::host {

bool HasAvx2() { return false; }

void DequantizeRowAvx2(const WeightRow& row, GlobalUse use, float global, int32_t out_type,
                       void* out) {
  DequantizeRowPortable(row, use, global, out_type, out);
}

}  // namespace nvfp4::host

#endif
