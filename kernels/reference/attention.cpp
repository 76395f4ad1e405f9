// Attention over the paged cache and the write into it, on host memory, in FP64.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "check_attention.h"
#include "host.h"

namespace nvfp4::host {
namespace {

// One query head of one token: what it sees.
struct Query {
  int64_t token, sequence, head;
  int64_t first_key, last_key;  // of last_key - first_key visible keys
};

// Elements from the start of a cache to key `key` of a sequence.
int64_t KeyOffset(const nvfp4_attention& a, const Query& query, int64_t key) {
  const int64_t block = a.block_table[query.sequence * a.block_table_stride + key / a.block_size];
  const int64_t kv_head = query.head / (a.q_heads / a.kv_heads);
  return block * a.cache_block_stride + key % a.block_size * a.cache_token_stride +
         kv_head * a.cache_head_stride;
}

// One query. The two scratch arrays hold the visible keys' weights and one head's sums.
void Attend(const nvfp4_attention& a, const Query& query, double* weights, double* sums) {
  const int64_t row = query.token * a.query_stride + query.head * a.head_dim;
  const int64_t visible = std::max<int64_t>(query.last_key - query.first_key, 0);
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < visible; ++i) {
    const int64_t key = KeyOffset(a, query, query.first_key + i);
    double dot = 0.0;
    for (int64_t d = 0; d < a.head_dim; ++d) {
      dot += static_cast<double>(Load(a.io_type, a.query, row + d)) *
             static_cast<double>(Load(a.io_type, a.k_cache, key + d));
    }
    weights[i] = dot * static_cast<double>(a.scale);
    largest = std::max(largest, weights[i]);
  }
  double total = 0.0;
  std::fill(sums, sums + a.head_dim, 0.0);
  for (int64_t i = 0; i < visible; ++i) {
    const double weight = std::exp(weights[i] - largest);
    const int64_t value = KeyOffset(a, query, query.first_key + i);
    total += weight;
    for (int64_t d = 0; d < a.head_dim; ++d) {
      sums[d] += weight * static_cast<double>(Load(a.io_type, a.v_cache, value + d));
    }
  }
  for (int64_t d = 0; d < a.head_dim; ++d) {
    Store(a.io_type, a.out, query.token * a.out_stride + query.head * a.head_dim + d,
          visible > 0 ? sums[d] / total : 0.0);
  }
}

// Every query of one sequence for one head.
void AttendSequence(const nvfp4_attention& a, int64_t sequence, int64_t head, double* weights,
                    double* sums) {
  const int64_t first = a.query_start[sequence], last = a.query_start[sequence + 1];
  for (int64_t token = first; token < last; ++token) {
    const int64_t seen =
        std::min<int64_t>(a.seq_lens[sequence] - (last - token) + 1, a.max_seq_len);
    const int64_t hidden = a.window > 0 ? std::max<int64_t>(seen - a.window, 0) : 0;
    Attend(a, {token, sequence, head, hidden, seen}, weights, sums);
  }
}

}  // namespace
}  // namespace nvfp4::host

using namespace nvfp4;
using namespace nvfp4::host;

extern "C" {

nvfp4_status nvfp4_attend_workspace_bytes(const nvfp4_attention* attention, int64_t* bytes) {
  NVFP4_TRY(CheckAttentionSizes(attention));
  NVFP4_TRY(CheckAligned("bytes", bytes, alignof(int64_t)));
  // Scores of each worker: one for each key.
  *bytes = RoundUp((attention->max_seq_len + attention->head_dim) * kMaxWorkers *
                       static_cast<int64_t>(sizeof(double)),
                   NVFP4_BUFFER_ALIGNMENT);
  return NVFP4_OK;
}

nvfp4_status nvfp4_attend(const nvfp4_attention* attention, void* workspace,
                          int64_t workspace_bytes, void*) {
  int64_t needed = 0;
  NVFP4_TRY(nvfp4_attend_workspace_bytes(attention, &needed));
  const nvfp4_attention& a = *attention;
  NVFP4_TRY(CheckAttention(a));
  NVFP4_TRY(CheckWorkspace({workspace, workspace_bytes, needed}));
  const int64_t rows = a.sequences * a.q_heads, scratch = a.max_seq_len + a.head_dim;
  const int64_t cost = a.tokens / a.sequences * a.max_seq_len * a.head_dim;
  auto* memory = static_cast<double*>(workspace);
  ForRows(rows, WorkersFor(rows, cost, kMaxWorkers), [&](int worker, int64_t begin, int64_t end) {
    double* weights = memory + worker * scratch;
    for (int64_t row = begin; row < end; ++row) {
      AttendSequence(a, row / a.q_heads, row % a.q_heads, weights, weights + a.max_seq_len);
    }
  });
  return NVFP4_OK;
}

nvfp4_status nvfp4_write_kv(const nvfp4_cache_rows* rows, void*) {
  NVFP4_TRY(CheckCacheRows(rows));
  const nvfp4_cache_rows& r = *rows;
  const int64_t element = TypeBytes(r.io_type);
  for (int64_t token = 0; token < r.tokens; ++token) {
    const int64_t slot = r.slots[token];
    if (slot < 0 || slot / r.block_size >= r.blocks) {
      continue;
    }
    for (int64_t head = 0; head < r.kv_heads; ++head) {
      const int64_t target =
          (slot / r.block_size * r.cache_block_stride + slot % r.block_size * r.cache_token_stride +
           head * r.cache_head_stride) *
          element;
      const auto bytes = static_cast<size_t>(r.head_dim * element);
      const int64_t k = (token * r.k_stride + head * r.head_dim) * element;
      const int64_t v = (token * r.v_stride + head * r.head_dim) * element;
      std::memcpy(static_cast<char*>(r.k_cache) + target, static_cast<const char*>(r.k) + k, bytes);
      std::memcpy(static_cast<char*>(r.v_cache) + target, static_cast<const char*>(r.v) + v, bytes);
    }
  }
  return NVFP4_OK;
}

}  // extern "C"
