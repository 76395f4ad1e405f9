// First kernel of a chunk of 64 tokens: everything that does not depend on the state.
//
// With G the sum of log decays since the start of the chunk, and keys of length 1, the updates u of
// a chunk solve (I + M) u = beta (v - exp(G) S k), M[i, j] = beta[i] exp(G[i] - G[j]) k[i] . k[j]
// below the diagonal. This kernel leaves (I + M)^-1 diag(beta) and the decayed scores of queries
// and keys, both FP16, and the row factors of the second kernel (sm70_gdn_chunk.cuh). No element of
// the inverse is larger than 1: each is a product of contractions.
//
// A CTA owns a chunk and a key head, whose keys and queries it leaves in operand form, too. Products
// of keys with keys and with queries stay in registers for all value heads: 10 tiles of 16 x 16 on
// and below the diagonal, at most 2 a warp. The inverse is FP32: 16 x 16 blocks on the diagonal by
// substitution, one a warp, then block by block away from it, two warps a block. Both matrices lie
// transposed in shared memory, 4 words (mod 32) from row to row. Limit: latency and barriers of the
// inverse, about 6,000 cycles a value head.
#pragma once
#include "device/gdn.cuh"
#include "device/mma_tile.cuh"

namespace nvfp4 {

constexpr int kBlocks = kChunk / 16;
constexpr int kSquarePitch = kChunk + 4;  // floats
constexpr int kPrepareWarps = kPrepareThreads / 32;
constexpr int kJobs = kBlocks * (kBlocks + 1) / 2;
constexpr int kJobsOfWarp = (kJobs + kPrepareWarps - 1) / kPrepareWarps;

template <int K>
constexpr int PrepareSharedBytes() {
  constexpr int kOperands = 2 * kChunk * (K + 8) * 2, kSquares = 2 * kChunk * kSquarePitch * 4;
  return kOperands > kSquares ? kOperands : kSquares;
}

// Row factors of a chunk in shared memory.
struct PrepareRows {
  float k_rest[kChunk], q_rest[kChunk];
  float log_decay[kChunk], beta[kChunk];
  float half_sum;  // of the first 32 tokens
};

// Where a chunk slot lies in the batch.
struct ChunkPlace {
  int begin, rows;  // first row and how many; 0 = an empty slot
};

__device__ __forceinline__ int FirstChunkSlot(const GdnBatch& batch, int sequence) {
  return batch.query_start[sequence] / kChunk + sequence;
}

__device__ __forceinline__ ChunkPlace PlaceOfSlot(const GdnBatch& batch, int slot) {
  int low = batch.decode_sequences, high = batch.sequences;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (FirstChunkSlot(batch, middle) <= slot) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const GdnSequence s = SequenceAt(batch, low);
  const int chunk = slot - FirstChunkSlot(batch, low);
  ChunkPlace place{s.begin + chunk * kChunk, 0};
  if (s.is_used && chunk >= 0) place.rows = min(kChunk, max(0, s.end - place.begin));
  return place;
}

__device__ __forceinline__ float SquaresOf(const uint4& raw) {
  const auto* pairs = reinterpret_cast<const __half2*>(&raw);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = __half22float2(pairs[i]);
    sum = fmaf(v.x, v.x, fmaf(v.y, v.y, sum));
  }
  return sum;
}

// One row of keys or queries by two lanes: loads, finds its norm, and leaves it times a power of
// two in shared memory. Rows beyond the sequence are zeros.
template <int K>
__device__ __forceinline__ void PrepareRow(const __half* row, bool is_there, bool normalize,
                                           __half* to, float* rest) {
  constexpr int kPieces = K / 16;  // of 8 halves, of one of the two lanes
  const int half = threadIdx.x & 1;
  uint4 raw[kPieces];
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    raw[j] = is_there ? Load128(row + (half * kPieces + j) * 8) : make_uint4(0, 0, 0, 0);
    squares += SquaresOf(raw[j]);
  }
  squares += __shfl_xor_sync(0xFFFFFFFFu, squares, 1);
  const float inverse = rsqrtf(squares + kKeyNormEps);
  const uint32_t exponent = __float_as_uint(inverse) & 0x7F800000u;
  const float power = __uint_as_float(exponent);
  const __half2 factor = __float2half2_rn(power);
#pragma unroll
  for (int j = 0; j < kPieces; ++j)
    *reinterpret_cast<uint4*>(to + (half * kPieces + j) * 8) = ScaleHalves(raw[j], factor);
  const float back = __uint_as_float(0x7F000000u - exponent);  // 1 / power
  if (half == 0) *rest = (normalize ? inverse : 1.0f) * back;
}

struct Job {
  int row, column;  // tiles
};
__device__ __forceinline__ Job JobOf(int index) {
  const int row = index < 1 ? 0 : index < 3 ? 1 : index < 6 ? 2 : 3;
  return {row, index - row * (row + 1) / 2};
}

// acc[r] += sum over 16 l of a[l][first + r] * b[column][l], both transposed blocks; two warps
// share a product of blocks.
__device__ __forceinline__ void BlockProduct(const float* a, const float* b, int column, int first,
                                             float (&acc)[4]) {
#pragma unroll
  for (int l = 0; l < 16; l += 4) {
    const float4 right = *reinterpret_cast<const float4*>(b + column * kSquarePitch + l);
    const float factor[4] = {right.x, right.y, right.z, right.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float4 left = *reinterpret_cast<const float4*>(a + (l + e) * kSquarePitch + first);
      acc[0] = fmaf(left.x, factor[e], acc[0]);
      acc[1] = fmaf(left.y, factor[e], acc[1]);
      acc[2] = fmaf(left.z, factor[e], acc[2]);
      acc[3] = fmaf(left.w, factor[e], acc[3]);
    }
  }
}

__device__ __forceinline__ float* BlockAt(float* square, int row, int column) {
  return square + column * 16 * kSquarePitch + row * 16;  // transposed
}

// The inverse of a block of I + M on the diagonal, a column a lane: when its element l is known,
// all below take it.
__device__ __forceinline__ void InvertDiagonal(const float* m, float* t, int lane) {
  const int column = lane & 15;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
  for (int l = 0; l < 15; ++l)
#pragma unroll
    for (int i = l + 1; i < 16; ++i) x[i] = fmaf(-m[l * kSquarePitch + i], x[l], x[i]);
  if (lane >= 16) return;
#pragma unroll
  for (int i = 0; i < 16; i += 4)
    *reinterpret_cast<float4*>(t + column * kSquarePitch + i) =
        make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
}

// T = (I + M)^-1 for the whole chunk. T[a, b] = -T[a, a] (sum over b <= c < a of M[a, c] T[c, b]);
// the sum passes through the place of T[a, b].
__device__ __forceinline__ void Invert(float* m, float* t) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < kBlocks) InvertDiagonal(BlockAt(m, warp, warp), BlockAt(t, warp, warp), lane);
  const int in_block = lane & 15, first = warp % 2 * 8 + lane / 16 * 4;
#pragma unroll 1
  for (int distance = 1; distance < kBlocks; ++distance) {
    const int column = warp / 2, row = column + distance;
    float* block = BlockAt(t, row, column);
    float4* place = reinterpret_cast<float4*>(block + in_block * kSquarePitch + first);
    __syncthreads();
    if (row < kBlocks) {
      float sum[4] = {};
#pragma unroll 1
      for (int c = column; c < row; ++c)
        BlockProduct(BlockAt(m, row, c), BlockAt(t, c, column), in_block, first, sum);
      *place = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
    __syncthreads();
    float result[4] = {};
    if (row < kBlocks) BlockProduct(BlockAt(t, row, row), block, in_block, first, result);
    __syncthreads();
    if (row < kBlocks) *place = make_float4(-result[0], -result[1], -result[2], -result[3]);
  }
  __syncthreads();
}

}  // namespace nvfp4
