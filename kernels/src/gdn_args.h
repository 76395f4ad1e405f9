// What the kernels of the gated delta rule are given, and how a batch is cut for them. Host code;
// the kernels read the arguments.
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "layout/operand.h"
#include "nvfp4.h"

namespace nvfp4 {

// Rows and slot of every sequence, as the ABI describes them.
struct GdnBatch {
  const int32_t* query_start;
  const int32_t* slots;
  const uint8_t* has_initial_state;  // null = all
  int32_t sequences, decode_sequences;
  int32_t first_slot, slot_count;
};

constexpr int kConvChannels = 2;  // of a thread
constexpr int kConvThreads = 128;
constexpr int kConvTokens = 16;  // of a CTA

struct ConvArgs {
  GdnBatch batch;
  const __half* x;
  __half* y;
  const void* weight;
  const void* bias;
  void* state;
  int64_t x_stride, y_stride;
  int64_t state_slot_stride, state_channel_stride, state_time_stride;
  int32_t tokens, channels;
  bool is_state_half, is_weight_half, silu;
};
cudaError_t LaunchConv(const ConvArgs& args, int width, cudaStream_t stream);

constexpr int kStepRows = 16;        // state rows of a CTA that goes token by token
constexpr int kStepThreads = 128;    // eight lanes a row
constexpr int64_t kStepsLimit = 16;  // longer sequences go in chunks

constexpr int kChunk = 64;  // tokens
constexpr int kPrepareThreads = 256;
constexpr int kChunkThreads = 256;
constexpr int kChunkValues = 32;  // state rows of a CTA that goes chunk by chunk

// What the first kernel of a chunk leaves for the second, of one value head. Matrices lie in tiles
// of 16 rows by 8 columns (OperandOffset), so that a warp loads operands without gaps.
struct ChunkRecord {
  __half inverse[kChunk * kChunk];  // of I + the lower triangle, columns times beta
  __half scores[kChunk * kChunk];   // of queries and keys, decayed; only the lower tiles are there
  float k_out[kChunk];              // what is left of the key's norm, times the decay
  float q_out[kChunk];              // the same of the query's
  float tail[kChunk];   // what is left of the key's norm, times the decay up to the last token
  float decay[kChunk];  // since the start of the chunk; the last is that of the whole
};
static_assert(sizeof(ChunkRecord) % NVFP4_BUFFER_ALIGNMENT == 0, "records follow each other");

// And of one key head: keys [64][K] and queries in tiles. Both are multiplied by a power of two,
// row by row, so that their norm is about 1: exact. What is left of their norms meets FP32 sums.
NVFP4_HD constexpr int64_t KeyRecordHalves(int64_t k_dim) { return 2 * kChunk * k_dim; }

struct DeltaArgs {
  GdnBatch batch;
  const __half* q;
  const __half* k;
  const __half* v;
  __half* out;
  const void* a;
  const void* b;
  const void* a_log;
  const void* dt_bias;
  void* state;
  ChunkRecord* records;  // [slots of this piece][v_heads]
  __half* key_records;   // [slots of this piece][k_heads][KeyRecordHalves]
  int64_t q_stride, k_stride, v_stride, out_stride, a_stride, b_stride, state_slot_stride;
  int32_t tokens, k_heads, v_heads, ratio, v_dim;
  int32_t first_record, record_count;  // chunk slots of this piece
  float scale;
  bool are_gates_half, is_a_log_half, is_dt_bias_half, is_state_half, normalize;
};

struct DeltaPlan {
  bool chunked;          // sequences behind the decode sequences go in chunks
  int64_t chunk_slots;   // over all pieces; some stay empty
  int64_t piece_slots;   // of one piece
  int64_t record_bytes;  // of a piece's value heads; its key heads follow
  int64_t workspace_bytes;
};
DeltaPlan PlanDelta(const nvfp4_delta& delta);

// Token by token: sequences first .. first + count - 1.
cudaError_t LaunchDeltaSteps(const DeltaArgs& args, int first, int count, int64_t k_dim,
                             cudaStream_t stream);
// One piece of chunk slots, of all sequences behind the decode sequences: what does not depend on
// the state, then chunk after chunk.
cudaError_t LaunchDeltaPrepare(const DeltaArgs& args, int64_t k_dim, cudaStream_t stream);
cudaError_t LaunchDeltaChunks(const DeltaArgs& args, int64_t k_dim, cudaStream_t stream);

cudaError_t LaunchGatedNorm(const nvfp4_gate_norm& norm, cudaStream_t stream);

}  // namespace nvfp4
