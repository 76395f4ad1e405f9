// Which keys a decode CTA reads, and how its warps load them.
#pragma once
#include "attention.cuh"

namespace nvfp4 {

// The loads of one warp: where the keys of a step lie for this lane.
template <int D>
class StepLoader {
 public:
  static constexpr int kLoads = 8;                // of a piece: two fit the registers
  static constexpr int kPieces = D / 8 / kLoads;  // of the keys of a step, and of its values

  __device__ __forceinline__ StepLoader(const AttentionArgs& p, const PagedKeys& keys,
                                        int first_key, int last_key, int step)
      : p_(p), keys_(keys), first_key_(first_key), last_key_(last_key) {
    FetchIds(step);
  }

  // Takes the keys of `step`, whose blocks were fetched before, and fetches those of `next`.
  __device__ __forceinline__ void Enter(int step, int next) {
    const int lane = threadIdx.x & 31, group = (lane >> 2) & 3, high = lane >> 4;
    int64_t at[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int unit = UnitOf(step, u);
      at[u] = keys_.OffsetOf(p_, unit, PagedKeys::BlockOf(p_, unit), ids_[u]);
    }
    const int in_unit = (group & 1) * 8 + (lane & 3) + 4 * high;
    k_ = p_.k_cache + (group < 2 ? at[0] : at[1]) + in_unit * p_.cache_token_stride;
    const int key = step * kStepKeys + (group >> 1) * kUnitKeys + in_unit;
    has_key_ = key >= first_key_ && key < last_key_;
    v_row_ = step * kStepKeys + (lane & 3);
#pragma unroll
    for (int u = 0; u < 2; ++u)
      v_[u] = p_.v_cache + at[u] + (lane & 3) * p_.cache_token_stride + (group * 2 + high) * 8;
    FetchIds(next);
  }

  template <int kPiece>
  __device__ __forceinline__ void Load(uint4 (&to)[kLoads]) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (kPiece < kPieces) {
        to[i] = LoadKeys128(k_ + (kPiece * kLoads + i) * 8, has_key_);
      } else {
        const int quad = QuadOf(kPiece - kPieces, i), key = v_row_ + 4 * quad;
        to[i] = LoadKeys128(v_[quad >> 2] + 4 * (quad & 3) * p_.cache_token_stride + PartOf(i) * 64,
                            key >= first_key_ && key < last_key_);
      }
    }
  }

  // Load i of a piece of values: which four keys of the step, which 64 of the head.
  static __device__ __forceinline__ constexpr int QuadOf(int piece, int i) {
    return (piece * kLoads + i) / (D / 64);
  }
  static __device__ __forceinline__ constexpr int PartOf(int i) { return i % (D / 64); }

 private:
  __device__ __forceinline__ int UnitOf(int step, int u) const {
    return min(2 * step + u, (last_key_ - 1) / kUnitKeys);
  }
  __device__ __forceinline__ void FetchIds(int step) {
#pragma unroll
    for (int u = 0; u < 2; ++u)
      ids_[u] = __ldg(keys_.table + PagedKeys::BlockOf(p_, UnitOf(step, u)));
  }

  const AttentionArgs& p_;
  const PagedKeys& keys_;
  const int first_key_, last_key_;
  int ids_[2];
  const __half* k_;
  const __half* v_[2];
  int v_row_;
  bool has_key_;
};

// The queries of one decode sequence.
struct DecodeQueries {
  int first_token, count, position;
  __device__ __forceinline__ DecodeQueries(const AttentionArgs& p, int sequence) {
    first_token = p.query_start[sequence];
    count = min(p.query_start[sequence + 1] - first_token, p.query_len);
    position = p.seq_lens[sequence] - (p.query_start[sequence + 1] - first_token);
  }
};

// What a CTA computes: some rows of one KV head; a row is a token of the sequence and a head.
struct DecodeWork {
  int head, split, sequence, first_row, rows;
  __device__ __forceinline__ DecodeWork(const AttentionArgs& p, const DecodeQueries& queries,
                                        int rows_a_cta)
      : head(blockIdx.x / p.row_tiles),
        split(blockIdx.y),
        sequence(blockIdx.z),
        first_row(blockIdx.x % p.row_tiles * rows_a_cta),
        rows(min(queries.count * p.ratio - first_row, rows_a_cta)) {}
};

}  // namespace nvfp4
