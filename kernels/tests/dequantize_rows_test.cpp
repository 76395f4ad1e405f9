// The AVX2 form of the row decoder gives the bits of the portable form, for every scale code and
// nibble.
#include "dequantize_rows.h"

#include <cstring>
#include <vector>

#include "expect.h"

namespace {

using namespace nvfp4;
using namespace nvfp4::host;

// Globals with full mantissas, and ones that make FP32 subnormals and FP16 overflow.
constexpr float kGlobals[] = {1.0F, 0.00031F, 3225.8064F, 1e-38F, 6e4F, 0x1.fffffep-3F};

struct Matrix {
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
  int32_t scale_type;
  int32_t group;

  WeightRow Row() const {
    return {codes.data(), scales.data(), scale_type, group, static_cast<int64_t>(codes.size()) * 2};
  }
};

// Every scale code 0x00 .. 0x7e over blocks that hold all nibbles in both positions.
Matrix AllE4m3(int32_t group) {
  Matrix matrix{{}, {}, NVFP4_E4M3, group};
  for (unsigned scale = 0; scale < 0x7f; ++scale) {
    matrix.scales.push_back(static_cast<uint8_t>(scale));
    for (int i = 0; i < group / 2; ++i) {
      matrix.codes.push_back(static_cast<uint8_t>((i * 0x11 + (i / 16) * 0x30) ^ (scale & 15U)));
    }
  }
  return matrix;
}

// FP16 or FP32 scales over the whole range of FP16.
Matrix WideScales(int32_t type) {
  Matrix matrix{{}, {}, type, 128};
  for (unsigned bits = 0; bits < 0x7c00U; bits += 37) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = HalfToFloat(half) * 1.1F;
    const auto* bytes = type == NVFP4_F16 ? reinterpret_cast<const uint8_t*>(&half)
                                          : reinterpret_cast<const uint8_t*>(&value);
    matrix.scales.insert(matrix.scales.end(), bytes, bytes + TypeBytes(type));
    for (unsigned i = 0; i < 64; ++i) {
      matrix.codes.push_back(static_cast<uint8_t>(i * 4 + bits));
    }
  }
  return matrix;
}

void FormsAgree(const Matrix& matrix, GlobalUse use, float global, int32_t type) {
  const WeightRow row = matrix.Row();
  const auto bytes = static_cast<size_t>(row.k * TypeBytes(type));
  // One byte past the end must stay as it is.
  std::vector<uint8_t> portable(bytes + 1, 0x5a);
  std::vector<uint8_t> fast(bytes + 1, 0x5a);
  DequantizeRowPortable(row, use, global, type, portable.data());
  DequantizeRowAvx2(row, use, global, type, fast.data());
  EXPECT(std::memcmp(portable.data(), fast.data(), bytes + 1) == 0);
  EXPECT(fast[bytes] == 0x5a);
}

void FormsAgreeOnAll(const Matrix& matrix) {
  for (const float global : kGlobals) {
    for (const GlobalUse use : {GlobalUse::kNone, GlobalUse::kMultiply, GlobalUse::kDivide}) {
      FormsAgree(matrix, use, global, NVFP4_F16);
      FormsAgree(matrix, use, global, NVFP4_F32);
    }
  }
}

void PortableFormIsTheProduct() {
  const Matrix matrix = AllE4m3(16);
  std::vector<float> out(matrix.codes.size() * 2);
  DequantizeRowPortable(matrix.Row(), GlobalUse::kNone, 0.0F, NVFP4_F32, out.data());
  for (size_t i = 0; i < out.size(); ++i) {
    const unsigned pair = matrix.codes[i / 2];
    const float code = kE2m1[i % 2 == 0 ? pair & 15U : pair >> 4];
    EXPECT(out[i] == code * E4m3ToFloat(matrix.scales[i / 16]));
  }
}

}  // namespace

int main() {
  PortableFormIsTheProduct();
  if (!HasAvx2()) {
    std::fprintf(stderr, "this processor has no AVX2: the portable form alone was tested\n");
    return nvfp4::test::Result();
  }
  for (const int32_t group : {16, 32, 64, 128}) {
    FormsAgreeOnAll(AllE4m3(group));
  }
  FormsAgreeOnAll(WideScales(NVFP4_F16));
  FormsAgreeOnAll(WideScales(NVFP4_F32));
  return nvfp4::test::Result();
}
