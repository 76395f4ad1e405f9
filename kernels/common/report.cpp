// The report of a repack: what it means is the same for both libraries.
#include "report.h"

#include <cinttypes>

namespace nvfp4 {
namespace {

struct Coordinates {
  uint64_t expert;
  uint64_t row;
  uint64_t column;
};

// The inverse of ((expert * rows) + row) * columns + column.
Coordinates Split(uint64_t index, uint64_t rows, uint64_t columns) {
  return {index / columns / rows, index / columns % rows, index % columns};
}

nvfp4_status ScaleFault(nvfp4_status status, const char* what, uint64_t count, uint64_t first,
                        const nvfp4_weight& weight) {
  const Coordinates at =
      Split(first, static_cast<uint64_t>(weight.n), static_cast<uint64_t>(weight.k / weight.group));
  return Fail(status,
              "%" PRIu64 " block scales are %s; the first is expert %" PRIu64 ", row %" PRIu64
              ", block %" PRIu64 " (columns from %" PRIu64 ").",
              count, what, at.expert, at.row, at.column,
              at.column * static_cast<uint64_t>(weight.group));
}

}  // namespace

nvfp4_status ReportStatus(const nvfp4_report* report, const nvfp4_weight& weight) {
  NVFP4_TRY(CheckReportPointer(report));
  if (report->magic != kReportMagic) {
    return Fail(NVFP4_EREPORT, "the report was not reset before the repack (magic 0x%" PRIx64 ").",
                report->magic);
  }
  if (report->nan_count != 0) {
    return ScaleFault(NVFP4_ESCALE_NAN, "NaN or infinite", report->nan_count, report->nan_first,
                      weight);
  }
  if (report->negative_count != 0) {
    return ScaleFault(NVFP4_ESCALE_NEGATIVE, "negative", report->negative_count,
                      report->negative_first, weight);
  }
  if (report->global_count != 0) {
    const Coordinates at = Split(report->global_first, static_cast<uint64_t>(weight.n), 1);
    return Fail(NVFP4_EGLOBAL,
                "%" PRIu64
                " globals are NaN, infinite, negative or a zero divisor; the first is "
                "expert %" PRIu64 ", row %" PRIu64 ".",
                report->global_count, at.expert, at.row);
  }
  return NVFP4_OK;
}

}  // namespace nvfp4
