// Weights to FP32 or FP16: from the packed form and straight from canonical tensors.
#include <atomic>

#include "dequantize_rows.h"
#include "report.h"
#include "validate.h"

namespace nvfp4::host {
namespace {

GlobalUse UseOf(uint32_t flags, int32_t global_kind) {
  if ((flags & static_cast<uint32_t>(NVFP4_DEQUANTIZE_UNSCALED)) != 0) {
    return GlobalUse::kNone;
  }
  return global_kind == NVFP4_GLOBAL_DIVISOR ? GlobalUse::kDivide : GlobalUse::kMultiply;
}

// Where row `row` of a matrix begins.
void* RowStart(void* data, int32_t type, int64_t row, int64_t stride) {
  return static_cast<uint8_t*>(data) + row * stride * TypeBytes(type);
}

WeightRow SourceRow(const nvfp4_source& source, int64_t row) {
  const auto* scales = static_cast<const uint8_t*>(source.scales);
  return {source.codes + row * source.codes_stride,
          scales + row * source.scales_stride * TypeBytes(source.scale_type), source.scale_type,
          source.group, source.k};
}

bool AnyFault(const nvfp4_source& source) {
  std::atomic<bool> found{false};
  const int workers = WorkersFor(source.n, source.k / source.group, kMaxThreads);
  ForRows(source.n, workers, [&](int, int64_t begin, int64_t end) {
    if (HasFaults(source, begin, end)) {
      found.store(true, std::memory_order_relaxed);
    }
  });
  return found.load(std::memory_order_relaxed);
}

// The status for a source with faults: its rows are those of a weight of one expert.
nvfp4_status FaultStatus(const nvfp4_source& source) {
  nvfp4_report report = kEmptyReport;
  CountFaults(source, 0, &report);
  nvfp4_weight shape = {};
  shape.n = source.n;
  shape.k = source.k;
  shape.group = source.group;
  return ReportStatus(&report, shape);
}

}  // namespace
}  // namespace nvfp4::host

using namespace nvfp4;
using namespace nvfp4::host;

extern "C" {

nvfp4_status nvfp4_dequantize(const nvfp4_weight* weight, int64_t expert, int64_t row_begin,
                              int64_t rows, uint32_t flags, int32_t out_type, void* out,
                              int64_t out_stride, void* /*stream*/) {
  NVFP4_TRY(CheckWeight(weight, kLayout));
  NVFP4_TRY(CheckDequantize(weight, expert, row_begin, rows, flags, out_type,
                            {"out", out, out_stride, weight->k}, kLayout));
  const GlobalUse use = UseOf(flags, weight->global_kind);
  ForRows(rows, WorkersFor(rows, weight->k, kMaxThreads), [&](int, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      DequantizeRow(RowOf(*weight, expert, row_begin + row), use,
                    GlobalOf(*weight, expert, row_begin + row), out_type,
                    RowStart(out, out_type, row, out_stride));
    }
  });
  return NVFP4_OK;
}

nvfp4_status nvfp4_dequantize_source(const nvfp4_source* source, uint32_t flags, int32_t out_type,
                                     void* out, int64_t out_stride) {
  NVFP4_TRY(CheckSource(source, 1));
  NVFP4_TRY(CheckFlags(flags));
  NVFP4_TRY(CheckIoType(out_type));
  NVFP4_TRY(CheckRows(out_type, {"out", out, out_stride, source->k}));
  if (AnyFault(*source)) {
    return FaultStatus(*source);
  }
  const GlobalUse use = UseOf(flags, source->global_kind);
  const int workers = WorkersFor(source->n, source->k, kMaxThreads);
  ForRows(source->n, workers, [&](int, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      DequantizeRow(SourceRow(*source, row), use, source->globals[row], out_type,
                    RowStart(out, out_type, row, out_stride));
    }
  });
  return NVFP4_OK;
}

}  // extern "C"
