// Checks of attention over the paged cache and of the write into it.
#include "check_attention.h"

#include <cinttypes>
#include <cmath>

namespace nvfp4 {
namespace {

// Where a block, a token and a head of a cache lie.
struct CacheStrides {
  int64_t block, token, head;
};

nvfp4_status CheckHeads(int64_t kv_heads, int64_t head_dim) {
  NVFP4_TRY(CheckSize("kv_heads", kv_heads, kHeadsLimit));
  NVFP4_TRY(CheckSize("head_dim", head_dim, kHeadDimLimit));
  if (head_dim % 8 != 0) {
    return Fail(NVFP4_ESHAPE, "head_dim must be a multiple of 8, is %" PRId64 ".", head_dim);
  }
  return NVFP4_OK;
}

nvfp4_status CheckCacheOf(int32_t type, int64_t head_dim, const void* k_cache, const void* v_cache,
                          int64_t block_size, const CacheStrides& strides) {
  NVFP4_TRY(CheckSize("block_size", block_size, kSizeLimit));
  if (block_size % 16 != 0) {
    return Fail(NVFP4_ESHAPE, "block_size must be a multiple of 16, is %" PRId64 ".", block_size);
  }
  NVFP4_TRY(CheckVectorRows(type, {"k_cache blocks", k_cache, strides.block, head_dim}));
  NVFP4_TRY(CheckVectorRows(type, {"k_cache tokens", k_cache, strides.token, head_dim}));
  NVFP4_TRY(CheckVectorRows(type, {"k_cache heads", k_cache, strides.head, head_dim}));
  return CheckVectorRows(type, {"v_cache blocks", v_cache, strides.block, head_dim});
}

}  // namespace

nvfp4_status CheckAttentionSizes(const nvfp4_attention* attention) {
  NVFP4_TRY(CheckAligned("attention", attention, alignof(nvfp4_attention)));
  const nvfp4_attention& a = *attention;
  if (a.struct_size != sizeof(a)) {
    return Fail(NVFP4_EVERSION, "nvfp4_attention has %zu bytes here, the caller's has %u.",
                sizeof(a), a.struct_size);
  }
  NVFP4_TRY(CheckIoType(a.io_type));
  NVFP4_TRY(CheckSize("tokens", a.tokens, kSizeLimit));
  NVFP4_TRY(CheckSize("sequences", a.sequences, kSequencesLimit));
  if (a.decode_sequences < 0 || a.decode_sequences > a.sequences) {
    return Fail(NVFP4_ESHAPE, "decode_sequences must be 0 to %" PRId64 ", is %" PRId64 ".",
                a.sequences, a.decode_sequences);
  }
  if (a.decode_sequences > 0) {
    NVFP4_TRY(CheckSize("decode_query_len", a.decode_query_len, kSizeLimit));
  }
  NVFP4_TRY(CheckSize("max_seq_len", a.max_seq_len, kSizeLimit));
  NVFP4_TRY(CheckHeads(a.kv_heads, a.head_dim));
  NVFP4_TRY(CheckSize("q_heads", a.q_heads, kHeadsLimit));
  if (a.q_heads % a.kv_heads != 0) {
    return Fail(NVFP4_ESHAPE,
                "q_heads must be a multiple of the %" PRId64 " kv_heads, is %" PRId64 ".",
                a.kv_heads, a.q_heads);
  }
  if (a.window < 0) {
    return Fail(NVFP4_ESHAPE, "window must be 0 or more, is %" PRId64 ".", a.window);
  }
  if (!(a.scale > 0.0F && std::isfinite(a.scale))) {
    return Fail(NVFP4_ESHAPE, "scale must be finite and above 0, is %g.",
                static_cast<double>(a.scale));
  }
  if (a.reserved != 0) {
    return Fail(NVFP4_EVERSION, "reserved must be 0, is %d.", a.reserved);
  }
  return NVFP4_OK;
}

nvfp4_status CheckAttention(const nvfp4_attention& a) {
  const int64_t width = a.q_heads * a.head_dim;
  NVFP4_TRY(CheckVectorRows(a.io_type, {"query", a.query, a.query_stride, width}));
  NVFP4_TRY(CheckVectorRows(a.io_type, {"out", a.out, a.out_stride, width}));
  NVFP4_TRY(CheckAligned("query_start", a.query_start, alignof(int32_t)));
  NVFP4_TRY(CheckAligned("seq_lens", a.seq_lens, alignof(int32_t)));
  NVFP4_TRY(CheckAligned("block_table", a.block_table, alignof(int32_t)));
  NVFP4_TRY(CheckCacheOf(a.io_type, a.head_dim, a.k_cache, a.v_cache, a.block_size,
                         {a.cache_block_stride, a.cache_token_stride, a.cache_head_stride}));
  if (a.block_table_stride < 1) {
    return Fail(NVFP4_ESTRIDE, "block_table_stride must be 1 or more, is %" PRId64 ".",
                a.block_table_stride);
  }
  return NVFP4_OK;
}

nvfp4_status CheckCacheRows(const nvfp4_cache_rows* rows) {
  NVFP4_TRY(CheckAligned("rows", rows, alignof(nvfp4_cache_rows)));
  const nvfp4_cache_rows& r = *rows;
  if (r.struct_size != sizeof(r)) {
    return Fail(NVFP4_EVERSION, "nvfp4_cache_rows has %zu bytes here, the caller's has %u.",
                sizeof(r), r.struct_size);
  }
  NVFP4_TRY(CheckIoType(r.io_type));
  NVFP4_TRY(CheckSize("tokens", r.tokens, kSizeLimit));
  NVFP4_TRY(CheckHeads(r.kv_heads, r.head_dim));
  const int64_t width = r.kv_heads * r.head_dim;
  NVFP4_TRY(CheckVectorRows(r.io_type, {"k", r.k, r.k_stride, width}));
  NVFP4_TRY(CheckVectorRows(r.io_type, {"v", r.v, r.v_stride, width}));
  NVFP4_TRY(CheckAligned("slots", r.slots, alignof(int64_t)));
  NVFP4_TRY(CheckSize("blocks", r.blocks, kSizeLimit));
  return CheckCacheOf(r.io_type, r.head_dim, r.k_cache, r.v_cache, r.block_size,
                      {r.cache_block_stride, r.cache_token_stride, r.cache_head_stride});
}

}  // namespace nvfp4
