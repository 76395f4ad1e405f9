// Packed weights of the sm_70 library: size, lay-out, repack, dequantize.
#include <cinttypes>

#include "abi.h"
#include "report.h"

namespace nvfp4::sm70 {
namespace {

struct Sizes {
  int64_t rows, packed, globals;  // of one expert; bytes are multiples of the buffer alignment
  int64_t Total(int64_t experts) const { return experts * (packed + globals); }
};

Sizes SizesOf(const nvfp4_weight_desc& desc) {
  const int64_t rows = PaddedRows(desc.n, desc.kind == NVFP4_GATE_UP);
  return {rows, RoundUp(rows / kTileN * TilesK(desc.k) * kRecordBytes, NVFP4_BUFFER_ALIGNMENT),
          RoundUp(rows * static_cast<int64_t>(sizeof(float)), NVFP4_BUFFER_ALIGNMENT)};
}

nvfp4_status CheckSupported(const nvfp4_weight_desc& desc) {
  if (desc.scale_type != NVFP4_E4M3 && desc.group < kTileK) {
    return Fail(NVFP4_EUNSUPPORTED, "FP16 and FP32 scales need groups of 64 or 128 here, not %d.",
                desc.group);
  }
  return NVFP4_OK;
}

nvfp4_weight LayOut(const nvfp4_weight_desc& desc, void* buffer) {
  const Sizes sizes = SizesOf(desc);
  nvfp4_weight weight = HandleOf(desc, kLayout);
  weight.n_padded = sizes.rows;
  weight.k_padded = TilesK(desc.k) * kTileK;
  weight.buffer_bytes = sizes.Total(desc.experts);
  auto* base = static_cast<char*>(buffer);
  weight.buffer = base;
  weight.codes = base;  // codes and scales share records
  weight.scales = base + kScaleOffset;
  weight.globals = reinterpret_cast<float*>(base + desc.experts * sizes.packed);
  weight.codes_expert_bytes = sizes.packed;
  weight.scales_expert_bytes = sizes.packed;
  weight.globals_expert_bytes = sizes.globals;
  weight.checksum = WeightChecksum(weight);
  return weight;
}

}  // namespace

nvfp4_status CheckCuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return NVFP4_OK;
  return Fail(NVFP4_EDEVICE, "%s failed: %s (%s).", call, cudaGetErrorString(error),
              cudaGetErrorName(error));
}

nvfp4_status CheckHalves(const char* what, int32_t io_type) {
  if (io_type != NVFP4_F16) {
    return Fail(NVFP4_EUNSUPPORTED, "this library computes %s in FP16, not in type %d.", what,
                io_type);
  }
  return NVFP4_OK;
}

nvfp4_status CheckActivations(int32_t io_type, int64_t rows, int64_t stride) {
  if (io_type != NVFP4_F16) {
    return Fail(NVFP4_EUNSUPPORTED, "products take FP16 activations (%d) here, not type %d.",
                NVFP4_F16, io_type);
  }
  constexpr int64_t kPieces = INT64_C(1) << 32;
  if (rows > kPieces / (stride / 8 + 1)) {
    return Fail(NVFP4_EUNSUPPORTED,
                "%" PRId64 " rows of stride %" PRId64 " exceed 2^35 elements; cut the batch.", rows,
                stride);
  }
  return NVFP4_OK;
}

MatmulArgs ArgsOf(const nvfp4_weight& weight) {
  MatmulArgs args{};
  args.packed = static_cast<const char*>(weight.codes);
  args.globals = weight.globals;
  args.n = weight.n;
  args.k = weight.k;
  args.tiles_n = weight.n_padded / kTileN;
  args.tiles_k = weight.k_padded / kTileK;
  args.epilogue_scale = HasFloatScales(weight) ? kEpilogueScaleFloat : kEpilogueScale;
  args.is_divisor = weight.global_kind == NVFP4_GLOBAL_DIVISOR;
  args.moe.packed_stride = weight.codes_expert_bytes;
  args.moe.globals_stride = weight.globals_expert_bytes / static_cast<int64_t>(sizeof(float));
  return args;
}

}  // namespace nvfp4::sm70

using namespace nvfp4;
using namespace nvfp4::sm70;

extern "C" {

nvfp4_status nvfp4_weight_bytes(const nvfp4_weight_desc* desc, int64_t* bytes) {
  NVFP4_TRY(CheckDesc(desc));
  NVFP4_TRY(CheckSupported(*desc));
  NVFP4_TRY(CheckAligned("bytes", bytes, alignof(int64_t)));
  *bytes = SizesOf(*desc).Total(desc->experts);
  return NVFP4_OK;
}

nvfp4_status nvfp4_weight_create(const nvfp4_weight_desc* desc, void* buffer, int64_t buffer_bytes,
                                 nvfp4_weight* weight, void* stream) {
  NVFP4_TRY(CheckDesc(desc));
  NVFP4_TRY(CheckSupported(*desc));
  NVFP4_TRY(CheckBuffer(buffer, buffer_bytes, SizesOf(*desc).Total(desc->experts)));
  NVFP4_TRY(CheckAligned("weight", weight, alignof(nvfp4_weight)));
  const nvfp4_weight made = LayOut(*desc, buffer);
  NVFP4_TRY(CheckCuda(
      cudaMemsetAsync(buffer, 0, static_cast<size_t>(made.buffer_bytes), StreamOf(stream)),
      "clearing the buffer"));
  *weight = made;
  return NVFP4_OK;
}

nvfp4_status nvfp4_weight_check(const nvfp4_weight* weight) { return CheckWeight(weight, kLayout); }

nvfp4_status nvfp4_report_reset(nvfp4_report* report, void* stream) {
  NVFP4_TRY(CheckReportPointer(report));
  return CheckCuda(
      LaunchReportReset(reinterpret_cast<DeviceReport*>(report), kReportMagic, StreamOf(stream)),
      "resetting the report");
}

nvfp4_status nvfp4_report_status(const nvfp4_report* host_report, const nvfp4_weight* weight) {
  NVFP4_TRY(CheckWeight(weight, kLayout));
  return ReportStatus(host_report, *weight);
}

nvfp4_status nvfp4_repack(const nvfp4_weight* weight, const nvfp4_source* source, int64_t expert,
                          int64_t row_begin, nvfp4_report* report, void* stream) {
  NVFP4_TRY(CheckRepack(weight, source, expert, row_begin, kLayout));
  NVFP4_TRY(CheckReportPointer(report));
  RepackArgs args{};
  args.codes = source->codes;
  args.scales = source->scales;
  args.globals = source->globals;
  args.out = static_cast<char*>(weight->codes) + expert * weight->codes_expert_bytes;
  args.out_globals = reinterpret_cast<float*>(reinterpret_cast<char*>(weight->globals) +
                                              expert * weight->globals_expert_bytes);
  args.report = reinterpret_cast<DeviceReport*>(report);
  args.codes_stride = source->codes_stride;
  args.scales_stride = source->scales_stride;
  args.rows = source->n;
  args.row_begin = row_begin;
  args.n = weight->n;
  args.k = weight->k;
  args.tiles_n = weight->n_padded / kTileN;
  args.first_row = expert * weight->n + row_begin;
  args.group = weight->group;
  args.scale_type = weight->scale_type;
  args.gate_up = IsGateUp(*weight);
  args.is_divisor = weight->global_kind == NVFP4_GLOBAL_DIVISOR;
  return CheckCuda(LaunchRepack(args, StreamOf(stream)), "repack");
}

nvfp4_status nvfp4_dequantize(const nvfp4_weight* weight, int64_t expert, int64_t row_begin,
                              int64_t rows, uint32_t flags, int32_t out_type, void* out,
                              int64_t out_stride, void* stream) {
  NVFP4_TRY(CheckDequantize(weight, expert, row_begin, rows, flags, out_type,
                            {"out", out, out_stride, weight == nullptr ? 0 : weight->k}, kLayout));
  DequantizeArgs args{};
  args.packed = static_cast<const char*>(weight->codes) + expert * weight->codes_expert_bytes;
  args.globals = reinterpret_cast<const float*>(reinterpret_cast<const char*>(weight->globals) +
                                                expert * weight->globals_expert_bytes);
  args.out = out;
  args.out_stride = out_stride;
  args.row_begin = row_begin;
  args.rows = rows;
  args.n = weight->n;
  args.k = weight->k;
  args.tiles_n = weight->n_padded / kTileN;
  args.tiles_k = weight->k_padded / kTileK;
  args.gate_up = IsGateUp(*weight);
  // The rows of a gate/up weight lie in pairs of tiles all over: take all of them.
  args.first_tile = args.gate_up ? 0 : row_begin / kTileN;
  args.last_tile = args.gate_up ? args.tiles_n : CeilDiv(row_begin + rows, kTileN);
  args.out_half = out_type == NVFP4_F16;
  args.float_scale = HasFloatScales(*weight);
  args.is_divisor = weight->global_kind == NVFP4_GLOBAL_DIVISOR;
  args.unscaled = (flags & NVFP4_DEQUANTIZE_UNSCALED) != 0;
  return CheckCuda(LaunchDequantize(args, StreamOf(stream)), "dequantize");
}

nvfp4_status nvfp4_dequantize_source(const nvfp4_source* /*source*/, uint32_t /*flags*/,
                                     int32_t /*out_type*/, void* /*out*/, int64_t /*out_stride*/) {
  return Fail(NVFP4_EUNSUPPORTED, "nvfp4_dequantize_source belongs to the host library.");
}

nvfp4_status nvfp4_set_threads(int32_t /*threads*/) {
  return Fail(NVFP4_EUNSUPPORTED, "nvfp4_set_threads belongs to the host library.");
}

}  // extern "C"
