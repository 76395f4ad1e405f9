// How a batch of the gated delta rule is cut: which sequences go in chunks, and how many of these
// fit one piece of the workspace. Pure host code.
#include <algorithm>

#include "gdn_args.h"

namespace nvfp4 {

// Chunk slots. Sequence s of a batch has the slots from query_start[s] / 64 + s on, one for each
// chunk: the next sequence's begin behind them wherever it starts, so no sum over lengths is needed
// and the host can bound them from the sizes alone.
DeltaPlan PlanDelta(const nvfp4_delta& d) {
  DeltaPlan plan{};
  plan.chunked = d.sequences > d.decode_sequences && d.max_query_len > kStepsLimit;
  if (!plan.chunked) return plan;
  const int64_t values = static_cast<int64_t>(sizeof(ChunkRecord)) * d.v_heads;
  const int64_t keys = KeyRecordHalves(d.k_dim) * static_cast<int64_t>(sizeof(__half)) * d.k_heads;
  const int64_t most = std::max<int64_t>(1, NVFP4_WORKSPACE_LIMIT_BYTES / (values + keys));
  plan.chunk_slots = d.tokens / kChunk + d.sequences;
  plan.piece_slots = std::min(plan.chunk_slots, most);
  plan.record_bytes = plan.piece_slots * values;
  plan.workspace_bytes = plan.piece_slots * (values + keys);
  return plan;
}

}  // namespace nvfp4
