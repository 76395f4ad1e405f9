// What the attention kernels are given, and how a batch is cut for them. Host code; the kernels
// read the arguments.
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "chooser.h"
#include "layout/tile.h"
#include "nvfp4.h"

namespace nvfp4 {

constexpr int kUnitKeys = 16;  // block sizes are multiples of it
constexpr int kStepKeys = 32;  // keys of one step of a decode warp
constexpr int kDecodeWarps = 4;
constexpr int kDecodeCtas = 2;   // of a multiprocessor
constexpr int kDecodeRows = 64;  // query rows (tokens times heads of a group) of a sequence at most
constexpr int kLeastSteps = 4;   // of one split: below, more splits only cost
constexpr int kMostSplits = 256;
constexpr int kPrefillRows = 128;  // query rows of a prefill CTA
constexpr int kPrefillKeys = 32;   // keys of one of its tiles

// units / units_per_block for units below 2^27, without a division: __umulhi(2 * units, magic) >>
// shift.
struct BlockDivider {
  uint32_t magic, shift;
};
BlockDivider DividerOf(int64_t units_per_block);

struct AttentionArgs {
  const __half* query;
  __half* out;
  const __half* k_cache;
  const __half* v_cache;
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* block_table;
  float* partial;       // [decode_sequences, kv_heads, splits, rows, head_dim]: sums of each split
  float2* stats;        // [decode_sequences, kv_heads, splits, rows]: largest score, sum of weights
  float* tile_partial;  // [tiles, kv_heads, tile_splits, kPrefillRows, head_dim], of prefill
  float2* tile_stats;   // [tiles, kv_heads, tile_splits, kPrefillRows]
  int64_t query_stride, out_stride, block_table_stride, cache_block_stride, cache_head_stride;
  int32_t cache_token_stride, block_size;
  BlockDivider divider;
  int32_t sequences, decode_sequences;
  int32_t kv_heads, ratio;     // query heads of a KV head
  int32_t rows, query_len;     // of one decode sequence at most; rows = ratio * query_len
  int32_t row_tiles;           // CTAs side by side for these rows
  int32_t splits;              // of the keys of a decode sequence
  int32_t tiles, tile_splits;  // of query rows of prefill for a KV head; of the keys of one
  int32_t window;              // INT32_MAX = all
  float scale_log2;            // scale * log2(e)
};

struct AttentionPlan {
  int32_t decode_sequences, rows, query_len, row_tiles, splits;
  int32_t tiles, tile_splits;
  // The sums of decode and of prefill, which follow each other in the same workspace.
  int64_t partial_bytes, tile_partial_bytes;
  int64_t workspace_bytes;  // with the statistics behind either
};
// Query rows of a decode CTA.
int64_t DecodeRowsOf(int64_t head_dim, int64_t rows);
// Prefill CTAs of a multiprocessor.
constexpr int PrefillCtas(int head_dim) { return head_dim == 256 ? 1 : head_dim == 128 ? 2 : 3; }
AttentionPlan PlanAttention(const nvfp4_attention& attention);
// What suffices for these and all smaller sizes.
int64_t AttentionWorkspaceBytes(const nvfp4_attention& attention);

cudaError_t LaunchDecode(const AttentionArgs& args, int64_t head_dim, cudaStream_t stream);
cudaError_t LaunchPrefill(const AttentionArgs& args, int64_t head_dim, cudaStream_t stream);
cudaError_t LaunchWriteKv(const nvfp4_cache_rows& rows, cudaStream_t stream);

}  // namespace nvfp4
