// Attention of many queries: prompts and chunks of them, over the paged cache.
//
// Idea   A CTA owns a tile of query rows of one KV head; a row is a token and a head of the group,
// so
//        heads share the keys, and the diagonal wastes little. A warp owns whole rows: its softmax
//        needs no other warp. Keys and values of a tile pass through one shared buffer, those of
//        the next are loaded into registers meanwhile. Scores become weights in registers:
//        accumulators are one exchange between two lanes away from the operand of the second
//        product. Keys are taken 16 of a quadpair at a time, so that the loop fits the instruction
//        cache.
// Tile   D = 64, 128: the four quadpairs of a warp take four groups of 8 rows. D = 256: two groups
// of
//        8 rows, and two halves of the keys (scores) or of the head (sums), so that the sums fit.
// Shared 16-byte pieces of a row at piece ^ SwizzleOf(row): eight lanes that read one piece column
// of
//        eight rows, or eight pieces of a row, touch all banks.
// Limit  shared-memory loads: one of 16 bytes feeds two products.
#pragma once
#include "device/prefill_keys.cuh"

namespace nvfp4 {

template <int D>
struct PrefillState {
  using Shape = PrefillShape<D>;
  float sums[Shape::kHeadParts][2][8];
  float largest[2], total[2];
};

// Where a lane's quadpair stands in its warp.
template <int D>
struct Quadpair {
  int row_group, column_group;
  __device__ __forceinline__ explicit Quadpair(int lane)
      : row_group(D == 256 ? lane >> 3 & 1 : lane >> 2 & 3),
        column_group(D == 256 ? lane >> 2 & 1 : 0) {}
  // 16-byte piece of a row that part `part` of the sums holds, for the lower and the upper lanes.
  // The second half of the head is taken in another order: no shared banks.
  __device__ __forceinline__ int PieceOf(int part, int high) const {
    return column_group * (PrefillShape<D>::kPieces / 2) + ((2 * part) ^ (column_group << 2)) +
           high;
  }
};

template <int D>
__device__ __forceinline__ void StageRows(const AttentionArgs& p, const PrefillTile& tile, int head,
                                          char* shared) {
  using Shape = PrefillShape<D>;
  for (int i = threadIdx.x; i < Shape::kRows * Shape::kPieces; i += Shape::kThreads) {
    const int row = i / Shape::kPieces, piece = i % Shape::kPieces, at = tile.first_row + row;
    const int64_t token = tile.first_token + at / p.ratio;
    const __half* from =
        p.query + token * p.query_stride + (head * p.ratio + at % p.ratio) * D + piece * 8;
    *reinterpret_cast<uint4*>(shared + row * D * 2 + (piece ^ SwizzleOf(row)) * 16) =
        LoadKeys128(from, row < tile.rows);
  }
}

// scores = query rows of the warp x keys of the tile. `query` and `keys` are this lane's first
// rows.
template <int D>
__device__ __forceinline__ void ScoreTile(float (&scores)[PrefillShape<D>::kKeyTiles][8],
                                          const char* query, const char* keys, int query_swizzle,
                                          int key_swizzle) {
  using Shape = PrefillShape<D>;
#pragma unroll
  for (int t = 0; t < Shape::kKeyTiles; ++t)
#pragma unroll
    for (int i = 0; i < 8; ++i) scores[t][i] = 0.0f;
  constexpr int kUnroll = Shape::kUnroll, kLow = kUnroll - 1;
#pragma unroll 1
  for (int part = 0; part < Shape::kPieces; part += kUnroll) {
    // Pieces part .. part + kLow, each at its own place of the same kUnroll places.
    const char* query_part = query + ((part ^ (query_swizzle & ~kLow)) * 16);
    const char* keys_part[Shape::kKeyTiles];
#pragma unroll
    for (int t = 0; t < Shape::kKeyTiles; ++t)
      keys_part[t] = keys + t * 8 * D * 2 + ((part ^ ((key_swizzle ^ (t << 2)) & ~kLow)) * 16);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const uint4 a =
          *reinterpret_cast<const uint4*>(query_part + ((k ^ (query_swizzle & kLow)) * 16));
#pragma unroll
      for (int t = 0; t < Shape::kKeyTiles; ++t) {
        const uint4 b = *reinterpret_cast<const uint4*>(
            keys_part[t] + ((k ^ ((key_swizzle ^ (t << 2)) & kLow)) * 16));
        MmaM8N8K4(scores[t], a.x, a.y, b.x, b.y);
        MmaM8N8K4(scores[t], a.z, a.w, b.z, b.w);
      }
    }
  }
}

// Weights of one tile of 8 keys as the first operand of the second product: register 2 j + h holds
// keys 4 j + 2 h and the next of this lane's row.
__device__ __forceinline__ void WeightOperand(const float (&w)[8], bool is_odd, uint32_t (&a)[4]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t low = PackHalves(w[4 * j], w[4 * j + 1]);
    const uint32_t high = PackHalves(w[4 * j + 2], w[4 * j + 3]);
    const uint32_t kept = is_odd ? high : low;
    const uint32_t got = __shfl_xor_sync(kAllLanes, is_odd ? low : high, 2);
    a[2 * j] = is_odd ? got : kept;
    a[2 * j + 1] = is_odd ? kept : got;
  }
}

// Scores of a tile that a row does not see.
template <int D>
__device__ __forceinline__ void MaskTile(const AttentionArgs& p,
                                         float (&scores)[PrefillShape<D>::kKeyTiles][8],
                                         int first_key, const PrefillTile& tile, int first_row) {
  const int lane = threadIdx.x & 31;
  int at[2];  // positions of this lane's two accumulator rows
#pragma unroll
  for (int r = 0; r < 2; ++r)
    at[r] = tile.position + (tile.first_row + first_row + AccumulatorRow(lane, 2 * r)) / p.ratio;
#pragma unroll
  for (int t = 0; t < PrefillShape<D>::kKeyTiles; ++t)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int key = first_key + t * 8 + (AccumulatorColumn(lane, i) & 7), row = i >> 1 & 1;
      if (key > at[row] || key <= at[row] - p.window) scores[t][i] = -INFINITY;
    }
}

// Scores to weights, in place; the sums are scaled where a row's largest score has moved far.
template <int D>
__device__ __forceinline__ void WeighTile(PrefillState<D>& state,
                                          float (&scores)[PrefillShape<D>::kKeyTiles][8],
                                          float scale) {
  using Shape = PrefillShape<D>;
  float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int t = 0; t < Shape::kKeyTiles; ++t)
#pragma unroll
    for (int i = 0; i < 8; ++i) largest[i >> 1 & 1] = fmaxf(largest[i >> 1 & 1], scores[t][i]);
  bool moves = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAllLanes, largest[r], 2));
    if (Shape::kColumnGroups == 2)
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAllLanes, largest[r], 4));
    largest[r] *= scale;
    moves = moves || largest[r] > state.largest[r] + kLazyScale;
  }
  if (__any_sync(kAllLanes, moves)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float next = fmaxf(largest[r], state.largest[r]);
      const float keep = Exp2(state.largest[r] - next);
      state.largest[r] = next;
      state.total[r] *= keep;
#pragma unroll
      for (int part = 0; part < Shape::kHeadParts; ++part)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if ((i >> 1 & 1) == r) {
            state.sums[part][0][i] *= keep;
            state.sums[part][1][i] *= keep;
          }
    }
  }
  const float offset[2] = {kWeightShift - state.largest[0], kWeightShift - state.largest[1]};
#pragma unroll
  for (int t = 0; t < Shape::kKeyTiles; ++t)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i >> 1 & 1;
      scores[t][i] = Exp2(fmaf(scores[t][i], scale, offset[r]));
      state.total[r] += scores[t][i];
    }
}

// sums += weights x values. `values` is this lane's first row: key lane & 3 of its own half.
template <int D>
__device__ __forceinline__ void AddTile(PrefillState<D>& state,
                                        const float (&weights)[PrefillShape<D>::kKeyTiles][8],
                                        const char* values, const Quadpair<D>& quad) {
  using Shape = PrefillShape<D>;
  const int lane = threadIdx.x & 31, high = lane >> 4;
  const bool is_odd = lane & 2;
  uint32_t operands[Shape::kKeyTiles][4];
#pragma unroll
  for (int t = 0; t < Shape::kKeyTiles; ++t) WeightOperand(weights[t], is_odd, operands[t]);
#pragma unroll 1
  for (int half = 0; half < Shape::kColumnGroups; ++half) {
    const int group = quad.column_group ^ half;
    const char* from = values + group * (Shape::kKeyTiles * 8) * D * 2;
#pragma unroll
    for (int t = 0; t < Shape::kKeyTiles; ++t)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = t * 8 + j * 4, swizzle = (lane & 3) | (t << 2);
#pragma unroll
        for (int part = 0; part < Shape::kHeadParts; ++part) {
          const int piece = quad.PieceOf(part, high);
          const uint4 b =
              *reinterpret_cast<const uint4*>(from + row * D * 2 + ((piece ^ swizzle) * 16));
          MmaRowRow(state.sums[part][0], operands[t][2 * j], operands[t][2 * j + 1], b.x, b.y);
          MmaRowRow(state.sums[part][1], operands[t][2 * j], operands[t][2 * j + 1], b.z, b.w);
        }
      }
    if constexpr (Shape::kColumnGroups == 2) {
      // The other quadpair of these rows has the weights of the other keys.
#pragma unroll
      for (int t = 0; t < Shape::kKeyTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) operands[t][i] = __shfl_xor_sync(kAllLanes, operands[t][i], 4);
    }
  }
}

// Rows of a warp to its own rows of the query buffer, which no other warp reads, and from there out.
template <int D>
__device__ __forceinline__ void StoreRows(const AttentionArgs& p, const PrefillTile& tile, int head,
                                          PrefillState<D>& state, const Quadpair<D>& quad,
                                          char* shared) {
  using Shape = PrefillShape<D>;
  const int lane = threadIdx.x & 31, warp_row = (threadIdx.x >> 5) * Shape::kWarpRows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = state.total[r] + __shfl_xor_sync(kAllLanes, state.total[r], 2);
    if (Shape::kColumnGroups == 2) total += __shfl_xor_sync(kAllLanes, total, 4);
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    const int row = warp_row + quad.row_group * 8 + AccumulatorRow(lane, 2 * r);
    char* to = shared + row * D * 2;
#pragma unroll
    for (int part = 0; part < Shape::kHeadParts; ++part)
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int piece = quad.PieceOf(part, h);
          const float (&sums)[8] = state.sums[part][t];
          *reinterpret_cast<uint32_t*>(to + ((piece ^ SwizzleOf(row)) * 16) + t * 8 +
                                       (lane & 2) * 2) =
              PackHalves(sums[4 * h + 2 * r] * inverse, sums[4 * h + 2 * r + 1] * inverse);
        }
  }
  __syncwarp();
#pragma unroll 4
  for (int i = lane; i < Shape::kWarpRows * Shape::kPieces; i += 32) {
    const int row = warp_row + i / Shape::kPieces, piece = i % Shape::kPieces;
    const int at = tile.first_row + row;
    if (row >= tile.rows) continue;
    const int64_t token = tile.first_token + at / p.ratio;
    *reinterpret_cast<uint4*>(p.out + token * p.out_stride + (head * p.ratio + at % p.ratio) * D +
                              piece * 8) =
        *reinterpret_cast<const uint4*>(shared + row * D * 2 + ((piece ^ SwizzleOf(row)) * 16));
  }
}

// Sums of one split of the keys, and what they are relative to.
template <int D>
__device__ __forceinline__ void StorePart(const AttentionArgs& p, const PrefillTile& tile, int head,
                                          const PrefillState<D>& state, const Quadpair<D>& quad) {
  using Shape = PrefillShape<D>;
  const int lane = threadIdx.x & 31;
  const int64_t base = PrefillTile::PartOf(p, blockIdx.x, head, blockIdx.z, Shape::kRows);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = state.total[r] + __shfl_xor_sync(kAllLanes, state.total[r], 2);
    if (Shape::kColumnGroups == 2) total += __shfl_xor_sync(kAllLanes, total, 4);
    const int row =
        (threadIdx.x >> 5) * Shape::kWarpRows + quad.row_group * 8 + AccumulatorRow(lane, 2 * r);
    const bool is_row = row < tile.rows;
    if (is_row && (lane & 2) == 0 && quad.column_group == 0)
      p.tile_stats[base + row] = make_float2(state.largest[r], total);
    float* to = p.tile_partial + (base + row) * D + (lane & 2);
#pragma unroll
    for (int part = 0; part < Shape::kHeadParts; ++part)
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float (&sums)[8] = state.sums[part][t];
          if (is_row)
            *reinterpret_cast<float2*>(to + quad.PieceOf(part, h) * 8 + t * 4) =
                make_float2(sums[4 * h + 2 * r], sums[4 * h + 2 * r + 1]);
        }
  }
}

template <int D>
__global__ void __launch_bounds__(PrefillShape<D>::kThreads, PrefillShape<D>::kCtas)
    AttentionPrefillKernel(const AttentionArgs p) {
  using Shape = PrefillShape<D>;
  extern __shared__ __align__(16) char shared[];
  const PrefillTile tile(p, blockIdx.x, Shape::kRows);
  if (tile.rows <= 0) return;
  const int head = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  char* keys_shared = shared + Shape::kRows * D * 2;

  const int first = tile.First(p), last = tile.Last(p), split = blockIdx.z;
  KeyRange range = tile.Keys(p);
  const KeySplit part(range, Shape::kKeys, p.tile_splits, split);
  if (part.HasNothing(split)) return;
  range.first = max(range.first, part.first * Shape::kKeys);
  range.last = min(range.last, part.last * Shape::kKeys);
  const PagedKeys paged(p, tile.sequence, head);
  TileLoader<D> loader(p, paged, range);
  StageRows<D>(p, tile, head, shared);

  const Quadpair<D> quad(lane);
  const int row = warp * Shape::kWarpRows + quad.row_group * 8 + RowOfLane(lane);
  const char* query = shared + row * D * 2;
  const int key = quad.column_group * (Shape::kKeyTiles * 8) + RowOfLane(lane);
  const char* keys = keys_shared + key * D * 2;
  const char* values = keys_shared + (Shape::kKeys + (lane & 3)) * D * 2;
  // Quadpairs of the second half of the keys walk the head in another order: no shared banks.
  const int turn = quad.column_group << 2;
  const int query_swizzle = SwizzleOf(row) ^ turn, key_swizzle = (lane & 3) ^ turn;
  PrefillState<D> state;
#pragma unroll
  for (int part = 0; part < Shape::kHeadParts; ++part)
#pragma unroll
    for (int i = 0; i < 8; ++i) state.sums[part][0][i] = state.sums[part][1][i] = 0.0f;
  state.largest[0] = state.largest[1] = kNoScore;
  state.total[0] = state.total[1] = 0.0f;

  const int first_tile = range.first / Shape::kKeys * Shape::kKeys;
  loader.Load(first_tile);
#pragma unroll 1
  for (int tile_key = first_tile; tile_key < range.last; tile_key += Shape::kKeys) {
    __syncthreads();  // nobody reads the last tile any more
    loader.Store(keys_shared);
    __syncthreads();
    loader.Load(tile_key + Shape::kKeys);
#pragma unroll 1
    for (int step = 0; step < Shape::kKeys; step += Shape::kStepKeys) {
      float scores[Shape::kKeyTiles][8];
      ScoreTile<D>(scores, query, keys + step * D * 2, query_swizzle, key_swizzle);
      const int step_key = tile_key + step;
      if (step_key + Shape::kStepKeys > first + 1 || step_key <= last - p.window)
        MaskTile<D>(p, scores, step_key + quad.column_group * (Shape::kKeyTiles * 8), tile,
                    warp * Shape::kWarpRows + quad.row_group * 8);
      WeighTile<D>(state, scores, p.scale_log2);
      AddTile<D>(state, scores, values + step * D * 2, quad);
    }
  }
  if (p.tile_splits > 1) {
    StorePart<D>(p, tile, head, state, quad);
  } else {
    // Every lane has read its query rows, and without a key in sight they may still be arriving.
    __syncthreads();
    StoreRows<D>(p, tile, head, state, quad, shared);
  }
}

}  // namespace nvfp4
