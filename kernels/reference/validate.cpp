#include "validate.h"

#include <algorithm>
#include <cmath>

namespace nvfp4::host {
namespace {

void Count(uint64_t index, uint64_t* count, uint64_t* first) {
  *count += 1;
  *first = std::min(*first, index);
}

// E4M3 codes 0x7f (NaN) and from 0x80 (sign set) are exactly those refused; the loop has no early
// exit so that it vectorises.
bool HasBadE4m3(const uint8_t* codes, int64_t count) {
  uint8_t bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    bad = static_cast<uint8_t>(bad | (codes[i] >= 0x7f ? 1 : 0));
  }
  return bad != 0;
}

bool HasBadScale(const nvfp4_source& source, int64_t row) {
  const int64_t blocks = source.k / source.group;
  const int64_t first = row * source.scales_stride;
  if (source.scale_type == NVFP4_E4M3) {
    return HasBadE4m3(static_cast<const uint8_t*>(source.scales) + first, blocks);
  }
  for (int64_t block = 0; block < blocks; ++block) {
    if (ScaleFaultOf(source.scale_type, source.scales, first + block) != ScaleFault::kNone) {
      return true;
    }
  }
  return false;
}

}  // namespace

ScaleFault ScaleFaultOf(int32_t type, const void* scales, int64_t index) {
  const float scale = LoadScale(type, scales, index);
  if (!std::isfinite(scale)) {
    return ScaleFault::kNan;
  }
  return std::signbit(scale) ? ScaleFault::kNegative : ScaleFault::kNone;
}

bool IsBadGlobal(int32_t global_kind, float global) {
  if (!std::isfinite(global) || std::signbit(global)) {
    return true;
  }
  return global_kind == NVFP4_GLOBAL_DIVISOR && global == 0.0F;
}

bool HasFaults(const nvfp4_source& source, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    if (HasBadScale(source, row) || IsBadGlobal(source.global_kind, source.globals[row])) {
      return true;
    }
  }
  return false;
}

void CountFaults(const nvfp4_source& source, int64_t first_row, nvfp4_report* report) {
  const int64_t blocks = source.k / source.group;
  for (int64_t row = 0; row < source.n; ++row) {
    if (!HasFaults(source, row, row + 1)) {
      continue;
    }
    for (int64_t block = 0; block < blocks; ++block) {
      const auto index = static_cast<uint64_t>((first_row + row) * blocks + block);
      switch (ScaleFaultOf(source.scale_type, source.scales, row * source.scales_stride + block)) {
        case ScaleFault::kNan:
          Count(index, &report->nan_count, &report->nan_first);
          break;
        case ScaleFault::kNegative:
          Count(index, &report->negative_count, &report->negative_first);
          break;
        case ScaleFault::kNone:
          break;
      }
    }
    if (IsBadGlobal(source.global_kind, source.globals[row])) {
      Count(static_cast<uint64_t>(first_row + row), &report->global_count, &report->global_first);
    }
  }
}

}  // namespace nvfp4::host
