// Checks of weights, sources and the calls on one weight.
#include <cinttypes>
#include <cstddef>
#include <cstring>

#include "check.h"

namespace nvfp4 {
namespace {

nvfp4_status CheckFormat(int64_t k, int32_t group, int32_t scale_type, int32_t global_kind) {
  if (group != 16 && group != 32 && group != 64 && group != 128) {
    return Fail(NVFP4_EGROUP, "group must be 16, 32, 64 or 128, is %d.", group);
  }
  NVFP4_TRY(CheckSize("k", k, kSizeLimit));
  if (k % 16 != 0) {
    return Fail(NVFP4_ESHAPE, "k must be a multiple of 16, is %" PRId64 ".", k);
  }
  if (k % group != 0) {
    return Fail(NVFP4_EGROUP, "k must be a multiple of the group %d, is %" PRId64 ".", group, k);
  }
  if (TypeBytes(scale_type) == 0) {
    return Fail(NVFP4_ETYPE, "scale_type must be NVFP4_F16, NVFP4_F32 or NVFP4_E4M3, is %d.",
                scale_type);
  }
  if (global_kind != NVFP4_GLOBAL_MULTIPLIER && global_kind != NVFP4_GLOBAL_DIVISOR) {
    return Fail(NVFP4_ETYPE, "global_kind must be a multiplier (1) or a divisor (2), is %d.",
                global_kind);
  }
  return NVFP4_OK;
}

nvfp4_status CheckSameFormat(const nvfp4_weight& weight, const nvfp4_source& source) {
  if (source.group != weight.group) {
    return Fail(NVFP4_EGROUP, "the source has groups of %d, the weight of %d.", source.group,
                weight.group);
  }
  if (source.scale_type != weight.scale_type || source.global_kind != weight.global_kind) {
    return Fail(NVFP4_ETYPE,
                "the source has scale_type %d and global_kind %d, the weight %d and %d.",
                source.scale_type, source.global_kind, weight.scale_type, weight.global_kind);
  }
  if (source.k != weight.k) {
    return Fail(NVFP4_ESHAPE, "the source has k = %" PRId64 ", the weight %" PRId64 ".", source.k,
                weight.k);
  }
  return NVFP4_OK;
}

nvfp4_status CheckRange(const nvfp4_weight& weight, int64_t expert, int64_t row_begin,
                        int64_t rows) {
  if (expert < 0 || expert >= weight.experts) {
    return Fail(NVFP4_ERANGE, "expert must be 0 to %" PRId64 ", is %" PRId64 ".",
                weight.experts - 1, expert);
  }
  NVFP4_TRY(CheckSize("rows", rows, kSizeLimit));
  if (row_begin < 0 || row_begin > weight.n - rows) {
    return Fail(NVFP4_ERANGE,
                "rows %" PRId64 " to %" PRId64 " are not all in the weight's 0 to %" PRId64 ".",
                row_begin, row_begin + rows - 1, weight.n - 1);
  }
  return NVFP4_OK;
}

}  // namespace

// FNV-1a (Fowler, Noll, Vo), 64 bits: finds damage, not malice.
uint64_t WeightChecksum(const nvfp4_weight& weight) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(&weight);
  uint64_t hash = UINT64_C(0xcbf29ce484222325);
  for (size_t i = 0; i < offsetof(nvfp4_weight, checksum); ++i) {
    hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
  }
  return hash;
}

nvfp4_weight HandleOf(const nvfp4_weight_desc& desc, const LayoutId& layout) {
  nvfp4_weight weight;
  std::memset(&weight, 0, sizeof(weight));
  weight.struct_size = sizeof(weight);
  weight.magic = NVFP4_WEIGHT_MAGIC;
  weight.layout = layout.layout;
  weight.layout_version = layout.version;
  weight.kind = desc.kind;
  weight.group = desc.group;
  weight.scale_type = desc.scale_type;
  weight.global_kind = desc.global_kind;
  weight.experts = desc.experts;
  weight.n = desc.n;
  weight.k = desc.k;
  return weight;
}

nvfp4_status CheckDesc(const nvfp4_weight_desc* desc) {
  NVFP4_TRY(CheckAligned("desc", desc, alignof(nvfp4_weight_desc)));
  if (desc->struct_size != sizeof(*desc)) {
    return Fail(NVFP4_EVERSION, "nvfp4_weight_desc has %zu bytes here, the caller's has %u.",
                sizeof(*desc), desc->struct_size);
  }
  if (desc->kind != NVFP4_LINEAR && desc->kind != NVFP4_GATE_UP) {
    return Fail(NVFP4_ETYPE, "kind must be NVFP4_LINEAR (1) or NVFP4_GATE_UP (2), is %d.",
                desc->kind);
  }
  if (desc->reserved != 0) {
    return Fail(NVFP4_ETYPE, "reserved must be 0, is %d.", desc->reserved);
  }
  NVFP4_TRY(CheckSize("experts", desc->experts, kExpertsLimit));
  NVFP4_TRY(CheckSize("n", desc->n, kSizeLimit));
  NVFP4_TRY(CheckFormat(desc->k, desc->group, desc->scale_type, desc->global_kind));
  if (desc->kind == NVFP4_GATE_UP && desc->n % 2 != 0) {
    return Fail(NVFP4_ESHAPE, "n of a gate/up weight must be even, is %" PRId64 ".", desc->n);
  }
  // An element takes at most 4.25 bytes padding included; 2^48 elements are beyond any machine, and
  // keep byte counts in 64 bits.
  if (desc->n > (INT64_C(1) << 48) / desc->k / desc->experts) {
    return Fail(NVFP4_ESHAPE,
                "a weight of %" PRId64 " x %" PRId64 " x %" PRId64 " exceeds 2^48 elements.",
                desc->experts, desc->n, desc->k);
  }
  return NVFP4_OK;
}

nvfp4_status CheckWeight(const nvfp4_weight* weight, const LayoutId& expected) {
  NVFP4_TRY(CheckAligned("weight", weight, alignof(nvfp4_weight)));
  if (weight->struct_size != sizeof(*weight)) {
    return Fail(NVFP4_EVERSION, "nvfp4_weight has %zu bytes here, the caller's has %u.",
                sizeof(*weight), weight->struct_size);
  }
  if (weight->magic != NVFP4_WEIGHT_MAGIC) {
    return Fail(NVFP4_EHANDLE, "the handle does not start like a weight (magic 0x%08x).",
                weight->magic);
  }
  if (weight->layout != expected.layout) {
    return Fail(NVFP4_EHANDLE, "the weight was made by another library (layout %u, here %u).",
                weight->layout, expected.layout);
  }
  if (weight->layout_version != expected.version) {
    return Fail(NVFP4_EVERSION, "the weight has layout version %u, this library %u; repack it.",
                weight->layout_version, expected.version);
  }
  if (weight->checksum != WeightChecksum(*weight)) {
    return Fail(NVFP4_EHANDLE, "the weight's checksum is wrong: the handle was changed.");
  }
  return NVFP4_OK;
}

nvfp4_status CheckSource(const nvfp4_source* source, int64_t codes_alignment) {
  NVFP4_TRY(CheckAligned("source", source, alignof(nvfp4_source)));
  if (source->struct_size != sizeof(*source)) {
    return Fail(NVFP4_EVERSION, "nvfp4_source has %zu bytes here, the caller's has %u.",
                sizeof(*source), source->struct_size);
  }
  NVFP4_TRY(CheckSize("n", source->n, kSizeLimit));
  NVFP4_TRY(CheckFormat(source->k, source->group, source->scale_type, source->global_kind));
  const RowsArgument codes{"codes", source->codes, source->codes_stride, source->k / 2};
  NVFP4_TRY(CheckRows(NVFP4_E4M3, codes));
  NVFP4_TRY(CheckAligned("codes", source->codes, codes_alignment));
  if (source->codes_stride % codes_alignment != 0) {
    return Fail(NVFP4_EALIGN, "the stride of codes is %" PRId64 ", not a multiple of %" PRId64 ".",
                source->codes_stride, codes_alignment);
  }
  const RowsArgument scales{"scales", source->scales, source->scales_stride,
                            source->k / source->group};
  NVFP4_TRY(CheckRows(source->scale_type, scales));
  return CheckAligned("globals", source->globals, alignof(float));
}

nvfp4_status CheckReportPointer(const nvfp4_report* report) {
  return CheckAligned("report", report, alignof(nvfp4_report));
}

nvfp4_status CheckRepack(const nvfp4_weight* weight, const nvfp4_source* source, int64_t expert,
                         int64_t row_begin, const LayoutId& expected) {
  constexpr int64_t kCodesAlignment = 8;
  NVFP4_TRY(CheckWeight(weight, expected));
  NVFP4_TRY(CheckSource(source, kCodesAlignment));
  NVFP4_TRY(CheckSameFormat(*weight, *source));
  return CheckRange(*weight, expert, row_begin, source->n);
}

nvfp4_status CheckFlags(uint32_t flags) {
  if ((flags & ~static_cast<uint32_t>(NVFP4_DEQUANTIZE_UNSCALED)) != 0) {
    return Fail(NVFP4_ETYPE, "flags has bits that mean nothing: 0x%x.", flags);
  }
  return NVFP4_OK;
}

nvfp4_status CheckDequantize(const nvfp4_weight* weight, int64_t expert, int64_t row_begin,
                             int64_t rows, uint32_t flags, int32_t out_type,
                             const RowsArgument& out, const LayoutId& expected) {
  NVFP4_TRY(CheckWeight(weight, expected));
  NVFP4_TRY(CheckRange(*weight, expert, row_begin, rows));
  NVFP4_TRY(CheckFlags(flags));
  NVFP4_TRY(CheckIoType(out_type));
  return CheckVectorRows(out_type, out);
}

nvfp4_status CheckMatmulWeight(const nvfp4_weight* weight, int64_t m, const LayoutId& expected) {
  NVFP4_TRY(CheckWeight(weight, expected));
  if (weight->kind != NVFP4_LINEAR || weight->experts != 1) {
    return Fail(NVFP4_ESHAPE,
                "a matmul takes a linear weight of one expert, not kind %d with %" PRId64
                " experts.",
                weight->kind, weight->experts);
  }
  return CheckSize("m", m, kSizeLimit);
}

nvfp4_status CheckMatmul(int32_t io_type, const RowsArgument& x, const RowsArgument& y,
                         const void* bias, const WorkspaceArgument& workspace) {
  NVFP4_TRY(CheckIoType(io_type));
  NVFP4_TRY(CheckVectorRows(io_type, x));
  NVFP4_TRY(CheckRows(io_type, y));
  if (bias != nullptr) {
    NVFP4_TRY(CheckAligned("bias", bias, TypeBytes(io_type)));
  }
  if (x.data == y.data) {
    return Fail(NVFP4_EALIGN, "x and y of a matmul are the same memory, %p.", x.data);
  }
  return CheckWorkspace(workspace);
}

nvfp4_status CheckProblem(const nvfp4_problem* problem, const nvfp4_choice* choice) {
  NVFP4_TRY(CheckAligned("problem", problem, alignof(nvfp4_problem)));
  NVFP4_TRY(CheckAligned("choice", choice, alignof(nvfp4_choice)));
  if (problem->struct_size != sizeof(*problem) || choice->struct_size != sizeof(*choice)) {
    return Fail(NVFP4_EVERSION,
                "nvfp4_problem and nvfp4_choice have %zu and %zu bytes here, the caller's %u "
                "and %u.",
                sizeof(*problem), sizeof(*choice), problem->struct_size, choice->struct_size);
  }
  nvfp4_weight_desc desc = {};
  desc.struct_size = sizeof(desc);
  desc.kind = problem->kind;
  desc.experts = problem->experts;
  desc.n = problem->n;
  desc.k = problem->k;
  desc.group = problem->group;
  desc.scale_type = problem->scale_type;
  desc.global_kind = NVFP4_GLOBAL_MULTIPLIER;
  NVFP4_TRY(CheckDesc(&desc));
  return CheckRouting(problem->m, problem->top_k, problem->experts);
}

}  // namespace nvfp4
