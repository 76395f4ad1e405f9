// Checks of the grouped products and of the small operations.
#include <cinttypes>

#include "check.h"

namespace nvfp4 {
namespace {

nvfp4_status CheckRotation(const nvfp4_rotary& rotary) {
  NVFP4_TRY(CheckSize("rotary_dim", rotary.rotary_dim, rotary.head_dim));
  if (rotary.rotary_dim % 2 != 0) {
    return Fail(NVFP4_ESHAPE, "rotary_dim must be even, is %" PRId64 ".", rotary.rotary_dim);
  }
  if (rotary.cos_sin_type != NVFP4_F16 && rotary.cos_sin_type != NVFP4_F32) {
    return Fail(NVFP4_ETYPE, "cos_sin_type must be NVFP4_F16 or NVFP4_F32, is %d.",
                rotary.cos_sin_type);
  }
  if (rotary.is_neox != 0 && rotary.is_neox != 1) {
    return Fail(NVFP4_ETYPE, "is_neox must be 0 or 1, is %d.", rotary.is_neox);
  }
  NVFP4_TRY(CheckAligned("cos_sin", rotary.cos_sin, TypeBytes(rotary.cos_sin_type)));
  NVFP4_TRY(CheckSize("max_position", rotary.max_position, kSizeLimit));
  return CheckAligned("positions", rotary.positions, alignof(int64_t));
}

nvfp4_status CheckCache(const nvfp4_rotary& rotary) {
  const int64_t width = rotary.kv_heads * rotary.head_dim;
  NVFP4_TRY(CheckRows(rotary.io_type, {"v", rotary.v, rotary.v_stride, width}));
  NVFP4_TRY(CheckAligned("k_cache", rotary.k_cache, TypeBytes(rotary.io_type)));
  NVFP4_TRY(CheckAligned("v_cache", rotary.v_cache, TypeBytes(rotary.io_type)));
  NVFP4_TRY(CheckAligned("slots", rotary.slots, alignof(int64_t)));
  NVFP4_TRY(CheckSize("blocks", rotary.blocks, kSizeLimit));
  NVFP4_TRY(CheckSize("block_size", rotary.block_size, kSizeLimit));
  const RowsArgument block{"cache blocks", rotary.k_cache, rotary.cache_block_stride,
                           rotary.head_dim};
  const RowsArgument token{"cache tokens", rotary.k_cache, rotary.cache_token_stride,
                           rotary.head_dim};
  const RowsArgument head{"cache heads", rotary.k_cache, rotary.cache_head_stride, rotary.head_dim};
  NVFP4_TRY(CheckRows(rotary.io_type, block));
  NVFP4_TRY(CheckRows(rotary.io_type, token));
  return CheckRows(rotary.io_type, head);
}

}  // namespace

nvfp4_status CheckRouting(int64_t m, int64_t top_k, int64_t experts) {
  NVFP4_TRY(CheckSize("m", m, kSizeLimit));
  NVFP4_TRY(CheckSize("experts", experts, kExpertsLimit));
  NVFP4_TRY(CheckSize("top_k", top_k, kTopKLimit));
  // FP32 sums of fewer than 2^30 pairs by fewer than 2^31 columns keep their byte count in 64 bits.
  constexpr int64_t kPairsLimit = (INT64_C(1) << 30) - 1;
  if (m > kPairsLimit / top_k) {
    return Fail(NVFP4_ESHAPE, "m * top_k must be below 2^30, is %" PRId64 " * %" PRId64 ".", m,
                top_k);
  }
  return NVFP4_OK;
}

nvfp4_status CheckRoutedIds(const int32_t* topk_ids, int64_t m, int64_t top_k, int64_t experts,
                            const int32_t* expert_map, int64_t map_size) {
  NVFP4_TRY(CheckRouting(m, top_k, experts));
  NVFP4_TRY(CheckAligned("topk_ids", topk_ids, alignof(int32_t)));
  if (expert_map == nullptr) {
    return NVFP4_OK;
  }
  NVFP4_TRY(CheckAligned("expert_map", expert_map, alignof(int32_t)));
  return CheckSize("map_size", map_size, kSizeLimit);
}

nvfp4_status CheckPlan(const void* plan, int64_t bytes, int64_t needed_bytes) {
  NVFP4_TRY(CheckAligned("plan", plan, NVFP4_BUFFER_ALIGNMENT));
  if (bytes < needed_bytes) {
    return Fail(NVFP4_EBUFFER, "the plan has %" PRId64 " bytes, this call needs %" PRId64 ".",
                bytes, needed_bytes);
  }
  return NVFP4_OK;
}

nvfp4_status CheckGroupedWeight(const nvfp4_weight* weight, int32_t kind, int64_t m, int64_t top_k,
                                const LayoutId& expected) {
  NVFP4_TRY(CheckWeight(weight, expected));
  if (weight->kind != kind) {
    return Fail(NVFP4_ESHAPE, "this product takes a weight of kind %d, not %d.", kind,
                weight->kind);
  }
  return CheckRouting(m, top_k, weight->experts);
}

nvfp4_status CheckGroupedWeights(const nvfp4_weight* gate_up, const nvfp4_weight* down,
                                 int64_t m_max, int64_t top_k, const LayoutId& expected) {
  if (gate_up != nullptr) {
    NVFP4_TRY(CheckGroupedWeight(gate_up, NVFP4_GATE_UP, m_max, top_k, expected));
  }
  if (down != nullptr) {
    NVFP4_TRY(CheckGroupedWeight(down, NVFP4_LINEAR, m_max, top_k, expected));
  }
  return NVFP4_OK;
}

nvfp4_status CheckGrouped(int32_t io_type, const RowsArgument& x, const RowsArgument& y,
                          const WorkspaceArgument& workspace) {
  NVFP4_TRY(CheckIoType(io_type));
  NVFP4_TRY(CheckVectorRows(io_type, x));
  NVFP4_TRY(CheckRows(io_type, y));
  if (x.data == y.data) {
    return Fail(NVFP4_EALIGN, "x and y of a grouped product are the same memory, %p.", x.data);
  }
  return CheckWorkspace(workspace);
}

nvfp4_status CheckTopK(int32_t logits_type, int64_t m, int64_t experts, int64_t top_k,
                       const RowsArgument& logits, const int32_t* ids, const float* weights) {
  NVFP4_TRY(CheckIoType(logits_type));
  NVFP4_TRY(CheckRouting(m, top_k, experts));
  if (top_k > experts) {
    return Fail(NVFP4_ESHAPE, "top_k is %" PRId64 ", more than the %" PRId64 " experts.", top_k,
                experts);
  }
  NVFP4_TRY(CheckRows(logits_type, logits));
  NVFP4_TRY(CheckAligned("ids", ids, alignof(int32_t)));
  return CheckAligned("weights", weights, alignof(float));
}

nvfp4_status CheckNorm(const nvfp4_norm* norm) {
  NVFP4_TRY(CheckAligned("norm", norm, alignof(nvfp4_norm)));
  if (norm->struct_size != sizeof(*norm)) {
    return Fail(NVFP4_EVERSION, "nvfp4_norm has %zu bytes here, the caller's has %u.",
                sizeof(*norm), norm->struct_size);
  }
  NVFP4_TRY(CheckIoType(norm->io_type));
  NVFP4_TRY(CheckIoType(norm->weight_type));
  if (!(norm->eps >= 0.0F && norm->eps <= 1.0F)) {
    return Fail(NVFP4_ESHAPE, "eps must be 0 to 1, is %g.", static_cast<double>(norm->eps));
  }
  NVFP4_TRY(CheckSize("rows", norm->rows, kSizeLimit));
  NVFP4_TRY(CheckSize("hidden", norm->hidden, kHiddenLimit));
  NVFP4_TRY(CheckAligned("weight", norm->weight, TypeBytes(norm->weight_type)));
  NVFP4_TRY(CheckRows(norm->io_type, {"x", norm->x, norm->x_stride, norm->hidden}));
  NVFP4_TRY(CheckRows(norm->io_type, {"y", norm->y, norm->y_stride, norm->hidden}));
  if (norm->residual == nullptr) {
    return NVFP4_OK;
  }
  return CheckRows(norm->io_type,
                   {"residual", norm->residual, norm->residual_stride, norm->hidden});
}

nvfp4_status CheckSiluMul(int32_t io_type, int64_t rows, int64_t width, const RowsArgument& x,
                          const RowsArgument& y) {
  NVFP4_TRY(CheckIoType(io_type));
  NVFP4_TRY(CheckSize("rows", rows, kSizeLimit));
  NVFP4_TRY(CheckSize("width", width, kSizeLimit));
  NVFP4_TRY(CheckRows(io_type, x));
  return CheckRows(io_type, y);
}

nvfp4_status CheckRotary(const nvfp4_rotary* rotary) {
  NVFP4_TRY(CheckAligned("rotary", rotary, alignof(nvfp4_rotary)));
  if (rotary->struct_size != sizeof(*rotary)) {
    return Fail(NVFP4_EVERSION, "nvfp4_rotary has %zu bytes here, the caller's has %u.",
                sizeof(*rotary), rotary->struct_size);
  }
  NVFP4_TRY(CheckIoType(rotary->io_type));
  NVFP4_TRY(CheckSize("tokens", rotary->tokens, kSizeLimit));
  NVFP4_TRY(CheckSize("kv_heads", rotary->kv_heads, kHiddenLimit));
  NVFP4_TRY(CheckSize("head_dim", rotary->head_dim, kHeadDimLimit));
  if (rotary->head_dim % 2 != 0) {
    return Fail(NVFP4_ESHAPE, "head_dim must be even, is %" PRId64 ".", rotary->head_dim);
  }
  const int64_t kv_width = rotary->kv_heads * rotary->head_dim;
  NVFP4_TRY(CheckRows(rotary->io_type, {"k", rotary->k, rotary->k_stride, kv_width}));
  if (rotary->q != nullptr) {
    NVFP4_TRY(CheckSize("q_heads", rotary->q_heads, kHiddenLimit));
    const int64_t q_width = rotary->q_heads * rotary->head_dim;
    NVFP4_TRY(CheckRows(rotary->io_type, {"q", rotary->q, rotary->q_stride, q_width}));
  }
  if (rotary->cos_sin != nullptr) {
    NVFP4_TRY(CheckRotation(*rotary));
  }
  if (rotary->k_cache == nullptr && rotary->v_cache == nullptr) {
    return NVFP4_OK;
  }
  return CheckCache(*rotary);
}

}  // namespace nvfp4
