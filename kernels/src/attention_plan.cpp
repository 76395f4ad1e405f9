// How a batch is cut for the attention kernels: a closed form of its sizes, the same on every
// machine.
#include <algorithm>

#include "attention_args.h"

namespace nvfp4 {
namespace {

constexpr int64_t kSlots = kMultiprocessors * kDecodeCtas;
constexpr int64_t kMostCtas = 4 * kSlots;  // of a launch whose keys are split
constexpr int64_t kLeastTileSteps = 16;    // of a split of prefill
constexpr int64_t kStartSteps = 3;         // what starting and summing a CTA costs, in steps

// The split of the keys that ends first: waves of CTAs times the steps of one.
int32_t ChooseSplits(int64_t heads, int64_t steps) {
  const int64_t most = std::min<int64_t>(kMostSplits, CeilDiv(steps, kLeastSteps));
  int64_t best = 1, best_cost = INT64_MAX;
  for (int64_t splits = 1; splits <= most && (splits == 1 || heads * splits <= kMostCtas);
       ++splits) {
    const int64_t waves = CeilDiv(heads * splits, kSlots);
    const int64_t cost = waves * (CeilDiv(steps, splits) + kStartSteps) + (splits > 1 ? 1 : 0);
    if (cost < best_cost) {
      best = splits;
      best_cost = cost;
    }
  }
  return static_cast<int32_t>(best);
}

int64_t Aligned(int64_t bytes) {
  return CeilDiv(bytes, NVFP4_BUFFER_ALIGNMENT) * NVFP4_BUFFER_ALIGNMENT;
}

int64_t SumsAndStats(int64_t rows, int64_t head_dim) {
  return Aligned(rows * head_dim * 4) + Aligned(rows * 8);
}

// What tiles of prefill find on the device at a time.
int64_t PrefillSlots(const nvfp4_attention& a) {
  return int64_t{kMultiprocessors} * PrefillCtas(static_cast<int>(a.head_dim));
}

// Splits of the keys of a tile that are worth their sums.
int64_t MostTileSplits(const nvfp4_attention& a) {
  const int64_t seen =
      a.window > 0 ? std::min(a.max_seq_len, a.window + kPrefillRows) : a.max_seq_len;
  return std::min<int64_t>(kMostSplits, seen / kPrefillKeys / kLeastTileSteps);
}

// Tiles of all sequences that are no decode sequences; few of them split their keys.
void PlanPrefill(const nvfp4_attention& a, AttentionPlan& plan) {
  const int64_t sequences = a.sequences - plan.decode_sequences;
  if (sequences == 0) return;
  // Every sequence ends in one tile of its own.
  plan.tiles = static_cast<int32_t>(a.tokens * (a.q_heads / a.kv_heads) / kPrefillRows + sequences);
  const int64_t ctas = plan.tiles * a.kv_heads;
  plan.tile_splits = static_cast<int32_t>(
      std::max<int64_t>(std::min(PrefillSlots(a) / ctas, MostTileSplits(a)), 1));
  if (plan.tile_splits == 1) return;
  const int64_t rows = ctas * plan.tile_splits * kPrefillRows;
  plan.tile_partial_bytes = Aligned(rows * a.head_dim * 4);
  plan.workspace_bytes = std::max(plan.workspace_bytes, SumsAndStats(rows, a.head_dim));
}

int64_t SumsOf(int64_t sequences, int64_t kv_heads, int64_t splits, int64_t rows,
               int64_t head_dim) {
  return splits > 1 ? sequences * kv_heads * splits * rows * head_dim * 4 : 0;
}

// Steps of 32 keys that a decode query can see.
int64_t StepsOf(const nvfp4_attention& a) {
  const int64_t seen = a.window > 0
                           ? std::min(a.max_seq_len, a.window + a.decode_query_len + kStepKeys)
                           : a.max_seq_len;
  return CeilDiv(seen, kStepKeys);
}

}  // namespace

BlockDivider DividerOf(int64_t units_per_block) {
  const auto divisor = static_cast<uint64_t>(2 * units_per_block);
  uint32_t bits = 1;
  while ((uint64_t{1} << bits) < divisor) ++bits;
  const uint32_t power = std::max(32U, 28 + bits);
  return {static_cast<uint32_t>((uint64_t{1} << power) / divisor + 1), power - 32};
}

int64_t DecodeRowsOf(int64_t head_dim, int64_t rows) {
  return head_dim == 256 || rows <= 8 ? 8 : 16;
}

AttentionPlan PlanAttention(const nvfp4_attention& a) {
  AttentionPlan plan{};
  const int64_t ratio = a.q_heads / a.kv_heads;
  if (a.decode_sequences > 0 && a.decode_query_len <= kDecodeRows / ratio) {
    plan.decode_sequences = static_cast<int32_t>(a.decode_sequences);
    plan.query_len = static_cast<int32_t>(a.decode_query_len);
    plan.rows = static_cast<int32_t>(ratio * a.decode_query_len);
    plan.row_tiles = static_cast<int32_t>(CeilDiv(plan.rows, DecodeRowsOf(a.head_dim, plan.rows)));
    plan.splits = ChooseSplits(a.decode_sequences * a.kv_heads * plan.row_tiles, StepsOf(a));
    plan.partial_bytes =
        Aligned(SumsOf(a.decode_sequences, a.kv_heads, plan.splits, plan.rows, a.head_dim));
    plan.workspace_bytes = plan.partial_bytes + Aligned(plan.partial_bytes / a.head_dim * 2);
  }
  PlanPrefill(a, plan);
  return plan;
}

int64_t AttentionWorkspaceBytes(const nvfp4_attention& a) {
  int64_t bytes = 0;
  const int64_t rows = a.q_heads / a.kv_heads * (a.decode_sequences > 0 ? a.decode_query_len : 1);
  if (a.decode_sequences > 0) {
    // Of any fewer sequences and shorter queries too: where keys are split, CTAs are bounded, and a
    // CTA has 16 rows at most.
    const int64_t most = std::min<int64_t>(kDecodeRows, rows);
    const int64_t heads = a.decode_sequences * a.kv_heads * CeilDiv(most, 8);
    const int64_t parts = std::min(kMostCtas, heads * kMostSplits);
    bytes = SumsAndStats(parts * std::min<int64_t>(most, 16), a.head_dim);
  }
  const bool has_prefill = a.decode_sequences < a.sequences || rows > kDecodeRows;
  if (has_prefill && MostTileSplits(a) > 1) {
    bytes = std::max(bytes, SumsAndStats(PrefillSlots(a) * kPrefillRows, a.head_dim));
  }
  return bytes;
}

}  // namespace nvfp4
