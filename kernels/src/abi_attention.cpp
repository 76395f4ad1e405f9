// Attention and the cache write of the sm_70 library.
#include <cinttypes>

#include "abi.h"
#include "attention_args.h"
#include "check_attention.h"

namespace nvfp4::sm70 {
namespace {

constexpr double kLog2E = 1.4426950408889634;
// Offsets inside of a block are 32-bit.
constexpr int64_t kTokenStrideLimit = INT64_C(1) << 24;
constexpr int64_t kBlockSizeLimit = INT64_C(1) << 20;

nvfp4_status CheckSupported(const nvfp4_attention& a) {
  NVFP4_TRY(CheckHalves("attention", a.io_type));
  if (a.head_dim != 64 && a.head_dim != 128 && a.head_dim != 256) {
    return Fail(NVFP4_EUNSUPPORTED,
                "this library has kernels for a head_dim of 64, 128 and 256, not %" PRId64 ".",
                a.head_dim);
  }
  if (a.tokens > kSizeLimit / a.q_heads) {
    return Fail(NVFP4_EUNSUPPORTED,
                "tokens * q_heads must be below 2^31, is %" PRId64 " * %" PRId64 ".", a.tokens,
                a.q_heads);
  }
  return NVFP4_OK;
}

nvfp4_status CheckStrides(const nvfp4_attention& a) {
  if (a.cache_token_stride > kTokenStrideLimit || a.block_size > kBlockSizeLimit) {
    return Fail(NVFP4_EUNSUPPORTED,
                "blocks of %" PRId64 " tokens, %" PRId64 " elements apart, are too large.",
                a.block_size, a.cache_token_stride);
  }
  return NVFP4_OK;
}

AttentionArgs ArgsOf(const nvfp4_attention& a, const AttentionPlan& plan, void* workspace) {
  AttentionArgs args{};
  args.query = static_cast<const __half*>(a.query);
  args.out = static_cast<__half*>(a.out);
  args.k_cache = static_cast<const __half*>(a.k_cache);
  args.v_cache = static_cast<const __half*>(a.v_cache);
  args.query_start = a.query_start;
  args.seq_lens = a.seq_lens;
  args.block_table = a.block_table;
  args.partial = static_cast<float*>(workspace);
  args.stats = reinterpret_cast<float2*>(static_cast<char*>(workspace) + plan.partial_bytes);
  args.tile_partial = args.partial;
  args.tile_stats =
      reinterpret_cast<float2*>(static_cast<char*>(workspace) + plan.tile_partial_bytes);
  args.query_stride = a.query_stride;
  args.out_stride = a.out_stride;
  args.block_table_stride = a.block_table_stride;
  args.cache_block_stride = a.cache_block_stride;
  args.cache_head_stride = a.cache_head_stride;
  args.cache_token_stride = static_cast<int32_t>(a.cache_token_stride);
  args.block_size = static_cast<int32_t>(a.block_size);
  args.divider = DividerOf(a.block_size / kUnitKeys);
  args.sequences = static_cast<int32_t>(a.sequences);
  args.decode_sequences = plan.decode_sequences;
  args.kv_heads = static_cast<int32_t>(a.kv_heads);
  args.ratio = static_cast<int32_t>(a.q_heads / a.kv_heads);
  args.rows = plan.rows;
  args.query_len = plan.query_len;
  args.row_tiles = plan.row_tiles;
  args.splits = plan.splits;
  args.tiles = plan.tiles;
  args.tile_splits = plan.tile_splits;
  args.window =
      static_cast<int32_t>(a.window == 0 || a.window > kSizeLimit ? kSizeLimit : a.window);
  args.scale_log2 = static_cast<float>(static_cast<double>(a.scale) * kLog2E);
  return args;
}

}  // namespace
}  // namespace nvfp4::sm70

using namespace nvfp4;
using namespace nvfp4::sm70;

extern "C" {

nvfp4_status nvfp4_attend_workspace_bytes(const nvfp4_attention* attention, int64_t* bytes) {
  NVFP4_TRY(CheckAttentionSizes(attention));
  NVFP4_TRY(CheckSupported(*attention));
  NVFP4_TRY(CheckAligned("bytes", bytes, alignof(int64_t)));
  *bytes = AttentionWorkspaceBytes(*attention);
  return NVFP4_OK;
}

nvfp4_status nvfp4_attend(const nvfp4_attention* attention, void* workspace,
                          int64_t workspace_bytes, void* stream) {
  NVFP4_TRY(CheckAttentionSizes(attention));
  const nvfp4_attention& a = *attention;
  NVFP4_TRY(CheckSupported(a));
  NVFP4_TRY(CheckAttention(a));
  NVFP4_TRY(CheckStrides(a));
  const AttentionPlan plan = PlanAttention(a);
  NVFP4_TRY(CheckWorkspace({workspace, workspace_bytes, plan.workspace_bytes}));
  const AttentionArgs args = ArgsOf(a, plan, workspace);
  if (args.decode_sequences > 0) {
    NVFP4_TRY(CheckCuda(LaunchDecode(args, a.head_dim, StreamOf(stream)), "attention of decode"));
  }
  if (args.tiles == 0) return NVFP4_OK;
  return CheckCuda(LaunchPrefill(args, a.head_dim, StreamOf(stream)), "attention of prefill");
}

nvfp4_status nvfp4_write_kv(const nvfp4_cache_rows* rows, void* stream) {
  NVFP4_TRY(CheckCacheRows(rows));
  return CheckCuda(LaunchWriteKv(*rows, StreamOf(stream)), "write_kv");
}

}  // extern "C"
