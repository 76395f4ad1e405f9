// The tiles of the prefill kernels: their sizes, the queries of a CTA, the loads of its threads.
#pragma once
#include "attention.cuh"

namespace nvfp4 {

template <int D>
struct PrefillShape {
  static constexpr int kRowGroups = D == 256 ? 2 : 4;  // quadpairs side by side along the rows
  static constexpr int kColumnGroups = 4 / kRowGroups;
  static constexpr int kWarps = D == 256 ? 8 : 4;
  static constexpr int kWarpRows = 8 * kRowGroups;
  static constexpr int kRows = kWarps * kWarpRows;  // query rows of a CTA
  static constexpr int kKeys = kPrefillKeys;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kCtas = PrefillCtas(D);
  static constexpr int kPieces = D / 8;                      // of 16 bytes in a row
  static constexpr int kLoads = kKeys * kPieces / kThreads;  // of a thread for keys or values
  static constexpr int kUnroll = 2;    // 16-byte pieces of the loop of the scores
  static constexpr int kKeyTiles = 2;  // of 8 keys of a quadpair's scores
  static constexpr int kStepKeys = 8 * kKeyTiles * kColumnGroups;  // of one step of the softmax
  static constexpr int kHeadParts = D / 16 / kColumnGroups;  // of 16 elements of a quadpair's sums
};

static_assert(PrefillShape<64>::kRows == kPrefillRows && PrefillShape<128>::kRows == kPrefillRows &&
                  PrefillShape<256>::kRows == kPrefillRows,
              "the plan counts tiles of one size");

template <int D>
constexpr int PrefillSharedBytes() {
  return (PrefillShape<D>::kRows + 2 * PrefillShape<D>::kKeys) * D * 2;
}

__device__ __forceinline__ constexpr int SwizzleOf(int row) {
  return (row & 3) | ((row >> 3 & 1) << 2);
}

// The queries of one CTA.
struct PrefillTile {
  int sequence, first_row, rows;  // packed rows of the sequence: token * ratio + head of the group
  int first_token, position;      // row of query and position of the sequence's first query

  // Tiles are numbered so that sequence s starts at query_start * ratio / kRows + s; some numbers
  // are left over. The last tiles see the most keys and start first.
  __device__ __forceinline__ PrefillTile(const AttentionArgs& p, int tile, int rows_a_tile) {
    const int base = p.query_start[p.decode_sequences];
    int low = p.decode_sequences, high = p.sequences;  // the last sequence that starts at or before
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      const int64_t start =
          static_cast<int64_t>(p.query_start[middle] - base) * p.ratio / rows_a_tile + middle -
          p.decode_sequences;
      (start <= tile ? low : high) = middle;
    }
    sequence = low;
    first_token = p.query_start[low];
    const int count = p.query_start[low + 1] - first_token, all = count * p.ratio;
    const int64_t start =
        static_cast<int64_t>(first_token - base) * p.ratio / rows_a_tile + low - p.decode_sequences;
    const int tiles = (all + rows_a_tile - 1) / rows_a_tile;
    const int at = tiles - 1 - (tile - static_cast<int>(start));
    first_row = at * rows_a_tile;
    rows = at < 0 ? 0 : min(all - first_row, rows_a_tile);
    position = p.seq_lens[low] - count;
  }

  // Positions of the first and the last row, and the keys that any row sees.
  __device__ __forceinline__ int First(const AttentionArgs& p) const {
    return position + first_row / p.ratio;
  }
  __device__ __forceinline__ int Last(const AttentionArgs& p) const {
    return position + (first_row + rows - 1) / p.ratio;
  }
  __device__ __forceinline__ KeyRange Keys(const AttentionArgs& p) const {
    return KeyRange(p, First(p), Last(p) - First(p) + 1);
  }
  // First row of a split of this tile in tile_stats and, times head_dim, in tile_partial.
  static __device__ __forceinline__ int64_t PartOf(const AttentionArgs& p, int tile, int head,
                                                   int split, int rows_a_tile) {
    return ((static_cast<int64_t>(tile) * p.kv_heads + head) * p.tile_splits + split) * rows_a_tile;
  }
};

// Loads of one thread: its rows of the keys and values of a tile.
template <int D>
class TileLoader {
  using Shape = PrefillShape<D>;
  static constexpr int kRowStep =
      Shape::kThreads / Shape::kPieces;  // rows of one load of all threads
  static constexpr int kUnits = Shape::kKeys / kUnitKeys, kUnitLoads = Shape::kLoads / kUnits;
  static_assert(kRowStep * kUnitLoads == kUnitKeys, "the loads of a thread lie in units, in order");

 public:
  __device__ __forceinline__ TileLoader(const AttentionArgs& p, const PagedKeys& keys,
                                        const KeyRange& range)
      : p_(p), keys_(keys), range_(range) {}

  __device__ __forceinline__ void Load(int first_key) {
    const int row = threadIdx.x / Shape::kPieces, piece = threadIdx.x % Shape::kPieces;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = first_key / kUnitKeys + u, block = PagedKeys::BlockOf(p_, unit);
      const bool is_used = unit * kUnitKeys < range_.last && (unit + 1) * kUnitKeys > range_.first;
      const int id = is_used ? __ldg(keys_.table + block) : 0;
      int64_t at = keys_.OffsetOf(p_, unit, block, id) + row * p_.cache_token_stride + piece * 8;
#pragma unroll
      for (int i = 0; i < kUnitLoads; ++i) {
        const int key = unit * kUnitKeys + row + i * kRowStep;
        const bool is_there = key >= range_.first && key < range_.last;
        rows_[0][u * kUnitLoads + i] = LoadKeys128(p_.k_cache + at, is_there);
        rows_[1][u * kUnitLoads + i] = LoadKeys128(p_.v_cache + at, is_there);
        at += kRowStep * p_.cache_token_stride;
      }
    }
  }

  // Keys, and behind them values.
  __device__ __forceinline__ void Store(char* shared) const {
    const int row = threadIdx.x / Shape::kPieces, piece = threadIdx.x % Shape::kPieces;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < Shape::kLoads; ++i) {
        const int at = row + i * kRowStep;
        *reinterpret_cast<uint4*>(shared + (half * Shape::kKeys + at) * D * 2 +
                                  ((piece ^ SwizzleOf(at)) * 16)) = rows_[half][i];
      }
  }

 private:
  const AttentionArgs& p_;
  const PagedKeys& keys_;
  const KeyRange& range_;
  uint4 rows_[2][Shape::kLoads];
};

}  // namespace nvfp4
