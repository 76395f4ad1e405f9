// Attention of a few queries over many keys: decode, and drafted tokens.
//
// Idea   A CTA reads the keys and values of one KV head and one split of a sequence once, for all
//        query rows of it (the heads of the group, times its tokens): they are the 8 * MT rows of
//        the tensor-core products. More rows are taken by CTAs side by side, which find them in L2.
//        Keys and values go from the cache to registers in operand order: the four quadpairs take
//        four groups of 8 keys for the scores and four parts of the head for the sums. A warp walks
//        steps of 32 keys with its own softmax, two pieces of loads in flight, and no barrier;
//        warps are summed in order at the end, splits by AttentionCombineKernel.
// Limit  memory: per step and warp of D = 128 16 KiB against about 600 instructions.
#pragma once
#include "device/decode_keys.cuh"

namespace nvfp4 {

constexpr int kWeightPitch = 2 * kStepKeys + 16;  // bytes of a row of weights

template <int D, int MT>
struct DecodeShared {
  char query[8 * MT * (2 * D + 16)];
  char weights[kDecodeWarps][8 * MT * kWeightPitch];
  float sums[8 * MT][D];
  float largest[kDecodeWarps][8 * MT], total[kDecodeWarps][8 * MT];
};

// What a warp keeps of its keys. Accumulators are those of layout/tile.h: a lane has two rows of
// each tile of 8.
template <int D, int MT>
struct DecodeState {
  float scores[MT][8];
  float sums[MT][D / 64][2][8];
  float largest[MT][2], total[MT][2];
};

// Scores that a row does not see become kNoScore. Only the first and last steps of a sequence have
// any.
template <int MT>
__device__ __forceinline__ void MaskScores(float (&scores)[MT][8], const AttentionArgs& p,
                                           int position, int first_row, int first_key,
                                           int last_key) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int key = first_key + AccumulatorColumn(lane, i);
      const int at = position + (first_row + m * 8 + AccumulatorRow(lane, i)) / p.ratio;
      if (key > at || key <= at - p.window || key >= last_key) scores[m][i] = -INFINITY;
    }
}

// Scores to weights: the running maximum, sums scaled to it, weights into the warp's shared rows.
template <int D, int MT>
__device__ __forceinline__ void WeighScores(DecodeState<D, MT>& state, float scale, char* weights) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float (&s)[8] = state.scores[m];
      float largest = fmaxf(fmaxf(s[2 * r], s[2 * r + 1]), fmaxf(s[2 * r + 4], s[2 * r + 5]));
#pragma unroll
      for (int step = 2; step <= 8; step *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
      largest = fmaxf(state.largest[m][r], largest * scale);
      const float keep = Exp2(state.largest[m][r] - largest);
      state.largest[m][r] = largest;
      const float offset = kWeightShift - largest;
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        w[i] = Exp2(fmaf(s[2 * r + (i & 1) + (i & 2) * 2], scale, offset));
      state.total[m][r] = state.total[m][r] * keep + ((w[0] + w[1]) + (w[2] + w[3]));
#pragma unroll
      for (int part = 0; part < D / 64; ++part)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          state.sums[m][part][i & 1][2 * r + (i >> 1 & 1) + (i & 4)] *= keep;
      char* row = weights + (m * 8 + AccumulatorRow(lane, 2 * r)) * kWeightPitch +
                  AccumulatorColumn(lane, 0) * 2;
      *reinterpret_cast<uint32_t*>(row) = PackHalves(w[0], w[1]);
      *reinterpret_cast<uint32_t*>(row + 8) = PackHalves(w[2], w[3]);
    }
}

// Query rows to shared memory; rows past the last are zero.
template <int D, int MT>
__device__ __forceinline__ void StageQuery(const AttentionArgs& p, char* shared, int first_token,
                                           const DecodeWork& work) {
  for (int i = threadIdx.x; i < 8 * MT * (D / 8); i += kDecodeWarps * 32) {
    const int row = i / (D / 8), piece = i % (D / 8);
    const int at = work.first_row + row;
    const int64_t token = first_token + at / p.ratio;
    const __half* from =
        p.query + token * p.query_stride + (work.head * p.ratio + at % p.ratio) * D + piece * 8;
    *reinterpret_cast<uint4*>(shared + row * (2 * D + 16) + piece * 16) =
        LoadKeys128(from, row < work.rows);
  }
}

// Sums of the warps, in order, with the largest score of all.
template <int D, int MT>
__device__ __forceinline__ void SumWarps(DecodeState<D, MT>& state, DecodeShared<D, MT>& shared) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = (lane >> 2) & 3;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int step = 2; step <= 8; step *= 2)
        state.total[m][r] += __shfl_xor_sync(kAllLanes, state.total[m][r], step);
      if ((lane & 14) == 0) {
        const int row = m * 8 + AccumulatorRow(lane, 2 * r);
        shared.largest[warp][row] = state.largest[m][r];
        shared.total[warp][row] = state.total[m][r];
      }
    }
  __syncthreads();
  float keep[MT][2];
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = kNoScore;
      for (int w = 0; w < kDecodeWarps; ++w)
        largest = fmaxf(largest, shared.largest[w][m * 8 + AccumulatorRow(lane, 2 * r)]);
      keep[m][r] = Exp2(state.largest[m][r] - largest);
    }
#pragma unroll 1
  for (int w = 0; w < kDecodeWarps; ++w) {
    if (warp == w) {
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int part = 0; part < D / 64; ++part)
#pragma unroll
          for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
              const int row = m * 8 + AccumulatorRow(lane, i);
              const int column = (part * 8 + group * 2 + (i >> 2)) * 8 + t * 4 + (lane & 2);
              auto* at = reinterpret_cast<float2*>(&shared.sums[row][column]);
              float2 sum = w == 0 ? make_float2(0.0f, 0.0f) : *at;
              sum.x += state.sums[m][part][t][i] * keep[m][i >> 1 & 1];
              sum.y += state.sums[m][part][t][i + 1] * keep[m][i >> 1 & 1];
              *at = sum;
            }
    }
    __syncthreads();
  }
}

// The sums of the CTA: the result, or one split of it.
template <int D, int MT>
__device__ __forceinline__ void StoreDecode(const AttentionArgs& p, DecodeShared<D, MT>& shared,
                                            int first_token, const DecodeWork& work) {
  const int64_t slot =
      ((static_cast<int64_t>(work.sequence) * p.kv_heads + work.head) * p.splits + work.split) *
          p.rows +
      work.first_row;
  for (int i = threadIdx.x; i < work.rows * (D / 4); i += kDecodeWarps * 32) {
    const int row = i / (D / 4), piece = i % (D / 4);
    float largest = kNoScore, total = 0.0f;
    for (int w = 0; w < kDecodeWarps; ++w) largest = fmaxf(largest, shared.largest[w][row]);
    for (int w = 0; w < kDecodeWarps; ++w)
      total += shared.total[w][row] * Exp2(shared.largest[w][row] - largest);
    float4 sum = *reinterpret_cast<float4*>(&shared.sums[row][piece * 4]);
    if (p.splits > 1) {
      *reinterpret_cast<float4*>(p.partial + (slot + row) * D + piece * 4) = sum;
      if (piece == 0) p.stats[slot + row] = make_float2(largest, total);
      continue;
    }
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    const int at = work.first_row + row;
    const int64_t token = first_token + at / p.ratio;
    __half* to =
        p.out + token * p.out_stride + (work.head * p.ratio + at % p.ratio) * D + piece * 4;
    *reinterpret_cast<uint2*>(to) = make_uint2(PackHalves(sum.x * inverse, sum.y * inverse),
                                               PackHalves(sum.z * inverse, sum.w * inverse));
  }
}

// One piece of loads: of keys into the scores, or of values into the sums.
template <int D, int MT, int kPiece>
__device__ __forceinline__ void UsePiece(DecodeState<D, MT>& state,
                                         const uint4 (&piece)[StepLoader<D>::kLoads],
                                         const char* query, const char* weights) {
  using Loader = StepLoader<D>;
  constexpr int kPieces = Loader::kPieces;
#pragma unroll
  for (int i = 0; i < Loader::kLoads; ++i)
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      if (kPiece < kPieces) {
        const uint4 a = *reinterpret_cast<const uint4*>(query + m * 8 * (2 * D + 16) +
                                                        (kPiece * Loader::kLoads + i) * 16);
        MmaM8N8K4(state.scores[m], a.x, a.y, piece[i].x, piece[i].y);
        MmaM8N8K4(state.scores[m], a.z, a.w, piece[i].z, piece[i].w);
      } else {
        const int quad = Loader::QuadOf(kPiece - kPieces, i), part = Loader::PartOf(i);
        const uint2 a = *reinterpret_cast<const uint2*>(weights + m * 8 * kWeightPitch + quad * 8);
        MmaRowRow(state.sums[m][part][0], a.x, a.y, piece[i].x, piece[i].y);
        MmaRowRow(state.sums[m][part][1], a.x, a.y, piece[i].z, piece[i].w);
      }
    }
}

// What the pieces of a step work on.
template <int D, int MT>
struct DecodeStep {
  const AttentionArgs& p;
  StepLoader<D>& loader;
  DecodeState<D, MT>& state;
  const char* query;       // this lane's row
  char* weights;           // of the warp
  const char* weight_row;  // this lane's row
  int position, last_key;  // of the first query; of the split
  int first_row;           // of the CTA
  int step;
};

// Pieces kPiece and after of a step, each followed by the loads of the piece after the next.
template <int D, int MT, int kPiece>
__device__ __forceinline__ void RunPieces(const DecodeStep<D, MT>& on,
                                          uint4 (&now)[StepLoader<D>::kLoads],
                                          uint4 (&next)[StepLoader<D>::kLoads]) {
  constexpr int kPieces = StepLoader<D>::kPieces, kAhead = kPiece + 2;
  if constexpr (kPiece == 0) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 8; ++i) on.state.scores[m][i] = 0.0f;
  }
  if constexpr (kPiece == kPieces) {
    const int first = on.step * kStepKeys, last = first + kStepKeys;
    // Every key of the step is seen by every row, unless the step holds the first or last ones.
    if (last > min(on.last_key, on.position + 1) ||
        first <= on.position + on.p.query_len - 1 - on.p.window)
      MaskScores(on.state.scores, on.p, on.position, on.first_row, first, on.last_key);
    __syncwarp();
    WeighScores(on.state, on.p.scale_log2, on.weights);
    __syncwarp();
  }
  UsePiece<D, MT, kPiece>(on.state, now, on.query, on.weight_row);
  if constexpr (kAhead == 2 * kPieces)
    on.loader.Enter(on.step + kDecodeWarps, on.step + 2 * kDecodeWarps);
  on.loader.template Load<kAhead % (2 * kPieces)>(now);
  if constexpr (kPiece + 1 < 2 * kPieces) RunPieces<D, MT, kPiece + 1>(on, next, now);
}

template <int D, int MT>
__global__ void __launch_bounds__(kDecodeWarps * 32, kDecodeCtas)
    AttentionDecodeKernel(const AttentionArgs p) {
  __shared__ __align__(16) DecodeShared<D, MT> shared;
  const DecodeQueries queries(p, blockIdx.z);
  const DecodeWork work(p, queries, 8 * MT);
  if (work.rows <= 0) return;
  const KeyRange keys(p, queries.position, queries.count);
  const KeySplit range(keys, kStepKeys, p.splits, work.split);
  if (range.HasNothing(work.split)) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  StageQuery<D, MT>(p, shared.query, queries.first_token, work);
  __syncthreads();

  DecodeState<D, MT> state;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      state.largest[m][i & 1] = kNoScore;
      state.total[m][i & 1] = 0.0f;
#pragma unroll
      for (int part = 0; part < D / 64; ++part)
        state.sums[m][part][0][i] = state.sums[m][part][1][i] = 0.0f;
    }
  const int first = range.first + warp;
  if (first < range.last) {
    const int last_key = min(keys.last, range.last * kStepKeys);
    const PagedKeys paged(p, work.sequence, work.head);
    StepLoader<D> loader(p, paged, keys.first, last_key, first);
    loader.Enter(first, first + kDecodeWarps);
    char* weights = shared.weights[warp];
    DecodeStep<D, MT> on{p,
                         loader,
                         state,
                         shared.query + RowOfLane(lane) * (2 * D + 16),
                         weights,
                         weights + RowOfLane(lane) * kWeightPitch,
                         queries.position,
                         last_key,
                         work.first_row,
                         first};
    uint4 even[StepLoader<D>::kLoads], odd[StepLoader<D>::kLoads];
    loader.template Load<0>(even);
    loader.template Load<1>(odd);
#pragma unroll 1
    for (; on.step < range.last; on.step += kDecodeWarps) RunPieces<D, MT, 0>(on, even, odd);
  }
  SumWarps(state, shared);
  StoreDecode(p, shared, queries.first_token, work);
}

}  // namespace nvfp4
