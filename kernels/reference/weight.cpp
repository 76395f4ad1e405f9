// Packed weights of the host library: size, lay-out, check.
#include <cstring>

#include "host.h"
#include "report.h"

namespace nvfp4::host {
namespace {

struct Parts {
  int64_t codes_bytes;  // of one expert, each a multiple of the buffer alignment
  int64_t scales_bytes;
  int64_t globals_bytes;

  int64_t ExpertBytes() const { return codes_bytes + scales_bytes + globals_bytes; }
};

Parts PartsOf(const nvfp4_weight_desc& desc) {
  const int64_t scales = desc.n * (desc.k / desc.group) * TypeBytes(desc.scale_type);
  const int64_t globals = desc.n * static_cast<int64_t>(sizeof(float));
  return {RoundUp(desc.n * (desc.k / 2), NVFP4_BUFFER_ALIGNMENT),
          RoundUp(scales, NVFP4_BUFFER_ALIGNMENT), RoundUp(globals, NVFP4_BUFFER_ALIGNMENT)};
}

nvfp4_weight LayOut(const nvfp4_weight_desc& desc, void* buffer) {
  const Parts parts = PartsOf(desc);
  auto* base = static_cast<uint8_t*>(buffer);
  nvfp4_weight weight = HandleOf(desc, kLayout);
  weight.n_padded = desc.n;
  weight.k_padded = desc.k;
  weight.buffer_bytes = desc.experts * parts.ExpertBytes();
  weight.buffer = base;
  weight.codes = base;
  weight.scales = base + desc.experts * parts.codes_bytes;
  weight.globals =
      reinterpret_cast<float*>(base + desc.experts * (parts.codes_bytes + parts.scales_bytes));
  weight.codes_expert_bytes = parts.codes_bytes;
  weight.scales_expert_bytes = parts.scales_bytes;
  weight.globals_expert_bytes = parts.globals_bytes;
  weight.checksum = WeightChecksum(weight);
  return weight;
}

}  // namespace
}  // namespace nvfp4::host

using namespace nvfp4;
using namespace nvfp4::host;

extern "C" {

nvfp4_status nvfp4_weight_bytes(const nvfp4_weight_desc* desc, int64_t* bytes) {
  NVFP4_TRY(CheckDesc(desc));
  NVFP4_TRY(CheckAligned("bytes", bytes, alignof(int64_t)));
  *bytes = desc->experts * PartsOf(*desc).ExpertBytes();
  return NVFP4_OK;
}

nvfp4_status nvfp4_weight_create(const nvfp4_weight_desc* desc, void* buffer, int64_t buffer_bytes,
                                 nvfp4_weight* weight, void* /*stream*/) {
  NVFP4_TRY(CheckDesc(desc));
  NVFP4_TRY(CheckBuffer(buffer, buffer_bytes, desc->experts * PartsOf(*desc).ExpertBytes()));
  NVFP4_TRY(CheckAligned("weight", weight, alignof(nvfp4_weight)));
  *weight = LayOut(*desc, buffer);
  std::memset(buffer, 0, static_cast<size_t>(weight->buffer_bytes));
  return NVFP4_OK;
}

nvfp4_status nvfp4_weight_check(const nvfp4_weight* weight) { return CheckWeight(weight, kLayout); }

nvfp4_status nvfp4_report_reset(nvfp4_report* report, void* /*stream*/) {
  NVFP4_TRY(CheckReportPointer(report));
  *report = kEmptyReport;
  return NVFP4_OK;
}

nvfp4_status nvfp4_report_status(const nvfp4_report* host_report, const nvfp4_weight* weight) {
  NVFP4_TRY(CheckWeight(weight, kLayout));
  return ReportStatus(host_report, *weight);
}

}  // extern "C"
