// Second kernel of a chunk of 64 tokens: the state runs through the chunks of a sequence.
//
// With S the state before the chunk, G the log decays since its start, and what
// sm70_gdn_prepare.cuh left of a chunk:
//   r = v - exp(G) (k S)       u = inverse r
//   out = scale (exp(G) (q S) + scores u)
//   S = exp(G_last) S + (exp(G_last - G) u)^T k
// Five products of 64 rows. S is FP32 in registers and FP16 in shared memory as an operand; r and u
// are rounded to FP16 once, after their FP32 sums.
//
// A CTA owns 32 rows of the state of a value head, which no other row needs. Eight warps: four
// groups of 16 tokens by two of 16 state rows; for the state two tiles of rows by four of 32 keys.
// Keys pass through shared memory, since every warp needs them as columns too; queries, scores and
// the inverse go from L2 to registers, a warp's loads without gaps. Four barriers a chunk; the loop
// fits the 768 instructions of the first instruction cache.
#pragma once
#include "device/gdn.cuh"
#include "device/mma_tile.cuh"

namespace nvfp4 {

constexpr int kValuePitch = kChunkValues + 8;  // halves

template <int K>
constexpr int ChunkSharedBytes() {
  return 2 * (kChunk + kChunkValues) * (K + 8) + 3 * 2 * kChunk * kValuePitch;
}

// What a warp of the chunk kernel owns, and where.
struct ChunkWarp {
  int lane, rows, values;      // first token of its tile, first state row of its tile
  int state_rows, state_keys;  // of the state: first row of its tile, first key of its tiles
};

// Read anew where it is called: what follows from it is computed again in every chunk, else the
// compiler keeps some 40 addresses and offsets in registers that there are not.
__device__ __forceinline__ ChunkWarp ThisWarp(int keys) {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  const int warp = thread / 32;
  return {thread % 32, warp % 4 * 16, warp / 4 * 16, warp % 2 * 16, warp / 2 * (keys / 4)};
}

template <int K>
struct ChunkShared {
  __half* keys;    // [64][K + 8], times k_in
  __half* state;   // [32][K + 8]
  __half* wanted;  // r [64][40]
  __half* update;  // u
  __half* tail;    // exp(G_last - G) u
};

// A chunk as a CTA sees it.
struct ChunkInputs {
  const ChunkRecord* record;
  const __half* keys;    // [64][K], queries in tiles behind them
  const __half* values;  // the CTA's first column of the first token
  __half* out;
  int rows;  // tokens up to the end of the sequence
};

// Keys of a chunk: first to registers, later to shared memory.
template <int K>
struct KeyPieces {
  static constexpr int kPieces = kChunk * K / 8 / kChunkThreads;
  uint4 raw[kPieces];
};

template <int K>
__device__ __forceinline__ void LoadKeyPieces(const __half* keys, KeyPieces<K>& pieces) {
#pragma unroll
  for (int j = 0; j < KeyPieces<K>::kPieces; ++j)
    pieces.raw[j] = Load128(keys + (j * kChunkThreads + threadIdx.x) * 8);
}

template <int K>
__device__ __forceinline__ void StoreKeyPieces(const KeyPieces<K>& pieces, __half* keys) {
#pragma unroll
  for (int j = 0; j < KeyPieces<K>::kPieces; ++j) {
    const int i = j * kChunkThreads + threadIdx.x;
    *reinterpret_cast<uint4*>(keys + i / (K / 8) * (K + 8) + i % (K / 8) * 8) = pieces.raw[j];
  }
}

constexpr int kQueriesAhead = 4;  // of 8 k each

struct QueryPieces {
  uint4 raw[kQueriesAhead];
};

// `queries`: the first piece of a lane's row; the next are 128 halves away.
__device__ __forceinline__ QueryPieces LoadQueries(const __half* queries) {
  QueryPieces found;
#pragma unroll
  for (int j = 0; j < kQueriesAhead; ++j) found.raw[j] = Load128(queries + 128 * j);
  return found;
}

// k S and q S of a warp's tile; `next` holds the first queries.
template <int K>
__device__ __forceinline__ void StateProducts(const ChunkShared<K>& shared, const ChunkWarp& warp,
                                              const __half* queries, QueryPieces next,
                                              float (&keys)[8], float (&sums)[8]) {
  constexpr int kPitch = K + 8, kStep = 8 * kQueriesAhead;
  const __half* key = shared.keys + (warp.rows + TileRowOfLane(warp.lane)) * kPitch;
  const __half* state = shared.state + (warp.values + TileColumnOfLane(warp.lane)) * kPitch;
#pragma unroll 1
  for (int first = 0; first < K; first += kStep) {
    const QueryPieces now = next;
    if (first + kStep < K) next = LoadQueries(queries + (first + kStep) * 16);
#pragma unroll
    for (int j = 0; j < kQueriesAhead; ++j) {
      const uint4 right = Load128(state + first + 8 * j);
      MmaTile8(keys, Load128(key + first + 8 * j), right);
      MmaTile8(sums, now.raw[j], right);
    }
  }
}

// The rows of a lower triangular square that a lane needs, in operand order; tiles above the
// diagonal are zeros, so that every warp runs the same products (the last group needs them all).
struct SquareRows {
  uint4 raw[kChunk / 8];
};

__device__ __forceinline__ SquareRows LoadSquare(const __half* square, const ChunkWarp& warp) {
  const __half* row = square + OperandOffset(warp.rows + TileRowOfLane(warp.lane), 0, kChunk);
  SquareRows found;
#pragma unroll
  for (int j = 0; j < kChunk / 8; ++j)
    found.raw[j] = j / 2 * 16 <= warp.rows ? Load128(row + 128 * j) : make_uint4(0, 0, 0, 0);
  return found;
}

// acc += left[rows of the tile][j] * right[j][values of the tile].
__device__ __forceinline__ void SquareProduct(const SquareRows& left, const __half* right,
                                              const ChunkWarp& warp, float (&acc)[8]) {
  const __half* column =
      right + (warp.lane & 3) * kValuePitch + warp.values + TileColumnsAt(warp.lane);
#pragma unroll
  for (int j = 0; j < kChunk / 8; ++j) {
    const __half* at = column + 8 * j * kValuePitch;
    MmaRowRow884(acc, left.raw[j].x, left.raw[j].y, Load64(at));
    MmaRowRow884(acc, left.raw[j].z, left.raw[j].w, Load64(at + 4 * kValuePitch));
  }
}

template <int K>
struct StateTiles {
  static constexpr int kTiles = K / 64;  // of 16 keys, of a warp
  float sums[kTiles][8];
};

// S = decay S + tail^T k.
template <int K>
__device__ __forceinline__ void AdvanceState(const ChunkShared<K>& shared, const ChunkWarp& warp,
                                             float decay, StateTiles<K>& state) {
  constexpr int kPitch = K + 8;
#pragma unroll
  for (int t = 0; t < StateTiles<K>::kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 8; ++i) state.sums[t][i] *= decay;
  const __half* left =
      shared.tail + (warp.lane & 3) * kValuePitch + warp.state_rows + TileRowsAt(warp.lane);
  const __half* right =
      shared.keys + (warp.lane & 3) * kPitch + warp.state_keys + TileColumnsAt(warp.lane);
#pragma unroll 4
  for (int j = 0; j < kChunk; j += 4) {
    const uint2 a = Load64(left + j * kValuePitch);
#pragma unroll
    for (int t = 0; t < StateTiles<K>::kTiles; ++t)
      MmaColRow884(state.sums[t], a, Load64(right + j * kPitch + 16 * t));
  }
}

// The operand form of a warp's part of the state.
template <int K>
__device__ __forceinline__ void PublishState(const ChunkShared<K>& shared, const ChunkWarp& warp,
                                             const StateTiles<K>& state) {
#pragma unroll
  for (int t = 0; t < StateTiles<K>::kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 8; i += 2)
      *reinterpret_cast<__half2*>(shared.state +
                                  (warp.state_rows + TileSumRow(warp.lane, i)) * (K + 8) +
                                  warp.state_keys + 16 * t + TileSumColumn(warp.lane, i)) =
          __floats2half2_rn(state.sums[t][i], state.sums[t][i + 1]);
}

// A warp's part of the state in memory: `place` is element 0 of the CTA's rows.
template <int K, typename State>
__device__ __forceinline__ void ReadState(const State* place, const ChunkWarp& warp, bool is_there,
                                          StateTiles<K>& state) {
#pragma unroll
  for (int t = 0; t < StateTiles<K>::kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = (warp.state_rows + TileSumRow(warp.lane, i)) * K + warp.state_keys + 16 * t +
                     TileSumColumn(warp.lane, i);
      state.sums[t][i] = is_there ? static_cast<float>(place[at]) : 0.0f;
    }
}

template <int K, typename State>
__device__ __forceinline__ void WriteState(State* place, const ChunkWarp& warp,
                                           const StateTiles<K>& state) {
#pragma unroll
  for (int t = 0; t < StateTiles<K>::kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = (warp.state_rows + TileSumRow(warp.lane, i)) * K + warp.state_keys + 16 * t +
                     TileSumColumn(warp.lane, i);
      place[at] = static_cast<State>(state.sums[t][i]);
    }
}

__device__ __forceinline__ void StorePairs(__half* to, const ChunkWarp& warp, const float (&v)[8],
                                           float first, float second) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float factor = i & 2 ? second : first;
    *reinterpret_cast<__half2*>(to + (warp.rows + TileSumRow(warp.lane, i)) * kValuePitch +
                                warp.values + TileSumColumn(warp.lane, i)) =
        __floats2half2_rn(v[i] * factor, v[i + 1] * factor);
  }
}

}  // namespace nvfp4
