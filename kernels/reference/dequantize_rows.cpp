#include "dequantize_rows.h"

#include <type_traits>

namespace nvfp4::host {
namespace {

float Scaled(double product, GlobalUse use, float global) {
  switch (use) {
    case GlobalUse::kMultiply:
      return static_cast<float>(product * static_cast<double>(global));
    case GlobalUse::kDivide:
      return static_cast<float>(product / static_cast<double>(global));
    case GlobalUse::kNone:
      break;
  }
  return static_cast<float>(product);
}

template <typename Element>
void WriteBlock(const BlockTable& table, const uint8_t* codes, int32_t group, Element* out) {
  Element elements[16] = {};
  for (unsigned code = 0; code < 16; ++code) {
    const float magnitude = table.magnitudes[code & 7U];
    const float value = code < 8U ? magnitude : -magnitude;
    if constexpr (std::is_same_v<Element, float>) {
      elements[code] = value;
    } else {
      elements[code] = FloatToHalf(value);
    }
  }
  for (int32_t pair = 0; pair < group / 2; ++pair) {
    out[2 * pair] = elements[codes[pair] & 15U];
    out[2 * pair + 1] = elements[codes[pair] >> 4];
  }
}

}  // namespace

BlockTable TableOf(const WeightRow& row, int64_t block, GlobalUse use, float global) {
  // code * scale has at most 26 significant bits and times a global at most 50, so FP64 holds both
  // exactly and one rounding is left. A quotient of two FP32 numbers rounded to FP64 and then to
  // FP32 equals the one rounded once (53 >= 2 * 24 + 2 bits).
  const double scale = static_cast<double>(LoadScale(row.scale_type, row.scales, block));
  BlockTable table = {};
  for (int code = 0; code < 8; ++code) {
    table.magnitudes[code] = Scaled(static_cast<double>(kE2m1[code]) * scale, use, global);
  }
  return table;
}

void DequantizeRowPortable(const WeightRow& row, GlobalUse use, float global, int32_t out_type,
                           void* out) {
  for (int64_t block = 0; block < row.k / row.group; ++block) {
    const BlockTable table = TableOf(row, block, use, global);
    const uint8_t* codes = row.codes + block * (row.group / 2);
    if (out_type == NVFP4_F32) {
      WriteBlock(table, codes, row.group, static_cast<float*>(out) + block * row.group);
    } else {
      WriteBlock(table, codes, row.group, static_cast<uint16_t*>(out) + block * row.group);
    }
  }
}

void DequantizeRow(const WeightRow& row, GlobalUse use, float global, int32_t out_type, void* out) {
  static const bool has_avx2 = HasAvx2();
  if (has_avx2) {
    DequantizeRowAvx2(row, use, global, out_type, out);
  } else {
    DequantizeRowPortable(row, use, global, out_type, out);
  }
}

}  // namespace nvfp4::host
