// The report of a repack: what it means is the same for both libraries.
#ifndef NVFP4_COMMON_REPORT_H_
#define NVFP4_COMMON_REPORT_H_

#include <cstdint>

#include "check.h"

namespace nvfp4 {

inline constexpr uint64_t kReportMagic = UINT64_C(0x54505234504656);  // "VFP4RPT"

// What nvfp4_report_reset writes.
inline constexpr nvfp4_report kEmptyReport = {kReportMagic, 0, UINT64_MAX, 0,
                                              UINT64_MAX,   0, UINT64_MAX, 0};

// The status and sentence of a report in host memory; `weight` was checked.
nvfp4_status ReportStatus(const nvfp4_report* report, const nvfp4_weight& weight);

}  // namespace nvfp4

#endif  // NVFP4_COMMON_REPORT_H_
