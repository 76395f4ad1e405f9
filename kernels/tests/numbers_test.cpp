// FP16 and E4M3 conversions, exhaustively where the domain is small.
#include "numbers.h"

#include <cmath>
#include <limits>

#include "expect.h"

namespace {

using nvfp4::BitsFloat;
using nvfp4::DoubleToHalf;
using nvfp4::E4m3ToFloat;
using nvfp4::FloatToHalf;
using nvfp4::HalfToFloat;

bool IsNanHalf(unsigned bits) { return (bits & 0x7fffU) > 0x7c00U; }

void HalfRoundTripKeepsEveryPattern() {
  for (unsigned bits = 0; bits < 0x10000U; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = HalfToFloat(half);
    if (IsNanHalf(bits)) {
      EXPECT(std::isnan(value));
      EXPECT(IsNanHalf(FloatToHalf(value)));
      continue;
    }
    EXPECT(FloatToHalf(value) == half);
    EXPECT(DoubleToHalf(static_cast<double>(value)) == half);
  }
}

// Between two neighbours: below the middle, on it, above it.
void RoundingGoesToTheNearestAndTiesToEven() {
  for (unsigned bits = 0; bits < 0x7c00U; ++bits) {
    const auto low = static_cast<uint16_t>(bits);
    const auto high = static_cast<uint16_t>(bits + 1);
    const double low_value = static_cast<double>(HalfToFloat(low));
    const double high_value =
        bits + 1 == 0x7c00U ? 65536.0 : static_cast<double>(HalfToFloat(high));
    const double middle = (low_value + high_value) / 2;
    const uint16_t even = bits % 2 == 0 ? low : high;
    const double below = std::nextafter(middle, 0.0);
    const double above = std::nextafter(middle, 1e9);
    EXPECT(DoubleToHalf(middle) == even);
    EXPECT(DoubleToHalf(below) == low);
    EXPECT(DoubleToHalf(above) == high);
    EXPECT(DoubleToHalf(-above) == (high | 0x8000U));
    EXPECT(FloatToHalf(static_cast<float>(middle)) == even);
    EXPECT(FloatToHalf(std::nextafterf(static_cast<float>(middle), 0.0F)) == low);
    EXPECT(FloatToHalf(std::nextafterf(static_cast<float>(middle), 1e9F)) == high);
  }
}

void SpecialValuesStayWhatTheyAre() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT(DoubleToHalf(kInfinity) == 0x7c00U);
  EXPECT(DoubleToHalf(-kInfinity) == 0xfc00U);
  EXPECT(DoubleToHalf(1e300) == 0x7c00U);
  EXPECT(DoubleToHalf(1e-300) == 0U);
  EXPECT(DoubleToHalf(-1e-300) == 0x8000U);
  EXPECT(IsNanHalf(DoubleToHalf(std::numeric_limits<double>::quiet_NaN())));
  EXPECT(IsNanHalf(FloatToHalf(BitsFloat(0x7f800001U))));  // a signalling NaN with a low payload
}

void E4m3ValuesFollowTheFormula() {
  for (unsigned code = 0; code < 256; ++code) {
    const float value = E4m3ToFloat(static_cast<uint8_t>(code));
    const unsigned exponent = (code >> 3) & 15U;
    const unsigned fraction = code & 7U;
    if ((code & 0x7fU) == 0x7fU) {
      EXPECT(std::isnan(value));
      continue;
    }
    const double magnitude = exponent == 0
                                 ? std::ldexp(fraction, -9)
                                 : std::ldexp(8.0 + fraction, static_cast<int>(exponent) - 10);
    EXPECT(std::fabs(static_cast<double>(value)) == magnitude);
    EXPECT(std::signbit(value) == (code >= 128));
  }
}

}  // namespace

int main() {
  HalfRoundTripKeepsEveryPattern();
  RoundingGoesToTheNearestAndTiesToEven();
  SpecialValuesStayWhatTheyAre();
  E4m3ValuesFollowTheFormula();
  return nvfp4::test::Result();
}
