// Canonical rows into a packed weight: here a copy, row by row.
#include <cstring>

#include "report.h"
#include "validate.h"

using namespace nvfp4;
using namespace nvfp4::host;

extern "C" nvfp4_status nvfp4_repack(const nvfp4_weight* weight, const nvfp4_source* source,
                                     int64_t expert, int64_t row_begin, nvfp4_report* report,
                                     void* /*stream*/) {
  NVFP4_TRY(CheckRepack(weight, source, expert, row_begin, kLayout));
  NVFP4_TRY(CheckReportPointer(report));
  if (report->magic != kReportMagic) {
    return Fail(NVFP4_EREPORT, "the report was not reset before the repack.");
  }
  CountFaults(*source, expert * weight->n + row_begin, report);
  const int64_t scale_bytes = TypeBytes(source->scale_type);
  const auto codes_bytes = static_cast<size_t>(source->k / 2);
  const auto scales_bytes = static_cast<size_t>(source->k / source->group * scale_bytes);
  auto* globals = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(weight->globals) +
                                           expert * weight->globals_expert_bytes);
  for (int64_t row = 0; row < source->n; ++row) {
    const WeightRow target = RowOf(*weight, expert, row_begin + row);
    std::memcpy(const_cast<uint8_t*>(target.codes), source->codes + row * source->codes_stride,
                codes_bytes);
    std::memcpy(
        const_cast<void*>(target.scales),
        static_cast<const uint8_t*>(source->scales) + row * source->scales_stride * scale_bytes,
        scales_bytes);
    globals[row_begin + row] = source->globals[row];
  }
  return NVFP4_OK;
}
