// Launch of the first kernel of a chunk, and the kernel itself.
#include "sm70_gdn_prepare.cuh"

namespace nvfp4 {

// Nothing is left of what has decayed this far; a bound keeps sums of logs precise.
constexpr float kLeastLogDecay = -30.0f;

namespace {

__device__ __forceinline__ void StoreHalves(__half* to, const float (&v)[8]) {
  uint4 out;
  auto* pairs = reinterpret_cast<__half2*>(&out);
#pragma unroll
  for (int e = 0; e < 4; ++e) pairs[e] = __floats2half2_rn(v[2 * e], v[2 * e + 1]);
  *reinterpret_cast<uint4*>(to) = out;
}

// Log decays since the start of the chunk, and betas, of one head; one token a thread.
__device__ __forceinline__ void PrepareGates(const DeltaArgs& p, const ChunkPlace& place, int head,
                                             PrepareRows& rows) {
  const int row = threadIdx.x;
  float sum = 0.0f;
  if (row < kChunk) {
    GdnGates gates{0.0f, 0.0f};
    if (row < place.rows) gates = GatesAt(p, place.begin + row, head);
    sum = fmaxf(gates.log_decay, kLeastLogDecay);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float before = __shfl_up_sync(0xFFFFFFFFu, sum, step);
      if (row % 32 >= step) sum += before;
    }
    rows.beta[row] = gates.beta;
    if (row == 31) rows.half_sum = sum;
  }
  __syncthreads();
  if (row < kChunk) rows.log_decay[row] = row < 32 ? sum : sum + rows.half_sum;
  __syncthreads();
}

// Sums of a tile into a square, transposed.
__device__ __forceinline__ void StoreSums(const Job& job, int lane, const float (&sums)[8],
                                          float* square) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    square[(job.column * 16 + TileSumColumn(lane, i)) * kSquarePitch + job.row * 16 +
           TileSumRow(lane, i)] = sums[i];
}

// A thread takes eight columns of a row at a time, as far as the row's tile on the diagonal.
template <typename Body>
__device__ __forceinline__ void ForLowerPieces(Body body) {
  const int row = threadIdx.x % kChunk;
#pragma unroll 1
  for (int column = threadIdx.x / kChunk * 8; column < row / 16 * 16 + 16;
       column += kPrepareThreads / kChunk * 8)
    body(row, column);
}

// Products of keys become M in place; those of queries go to the record as scores.
__device__ __forceinline__ void DecaySquares(const PrepareRows& rows, float* m,
                                             const float* queries, __half* scores) {
  ForLowerPieces([&](int row, int column) {
    const float key_factor = rows.beta[row] * rows.k_rest[row], query_factor = rows.q_rest[row];
    float score[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int j = column + e, at = j * kSquarePitch + row;
      const float decay = __expf(fminf(rows.log_decay[row] - rows.log_decay[j], 0.0f));
      const float factor = decay * rows.k_rest[j];
      m[at] = row > j ? key_factor * factor * m[at] : 0.0f;
      score[e] = row >= j ? query_factor * factor * queries[at] : 0.0f;
    }
    StoreHalves(scores + OperandOffset(row, column, kChunk), score);
  });
}

__device__ __forceinline__ void StoreInverse(const float* t, const PrepareRows& rows,
                                             __half* inverse) {
  ForLowerPieces([&](int row, int column) {
    float value[8];
#pragma unroll
    for (int e = 0; e < 8; ++e)
      value[e] = t[(column + e) * kSquarePitch + row] * rows.beta[column + e];
    StoreHalves(inverse + OperandOffset(row, column, kChunk), value);
  });
}

__device__ __forceinline__ void StoreFactors(const PrepareRows& rows, ChunkRecord* record) {
  const int row = threadIdx.x;
  if (row >= kChunk) return;
  const float decay = expf(rows.log_decay[row]);
  record->k_out[row] = rows.k_rest[row] * decay;
  record->q_out[row] = rows.q_rest[row] * decay;
  record->tail[row] = rows.k_rest[row] * expf(rows.log_decay[kChunk - 1] - rows.log_decay[row]);
  record->decay[row] = decay;
}

// Keys as rows, queries in tiles.
template <int K>
__device__ __forceinline__ void StoreOperands(const __half* keys, const __half* queries,
                                              __half* record) {
#pragma unroll 2
  for (int i = threadIdx.x; i < kChunk * K / 8; i += kPrepareThreads) {
    const int row = i / (K / 8), column = i % (K / 8) * 8;
    *reinterpret_cast<uint4*>(record + i * 8) = Load128(keys + row * (K + 8) + column);
    const int tile_row = i / (2 * K) * 16 + i % 16, tile_column = i / 16 % (K / 8) * 8;
    *reinterpret_cast<uint4*>(record + kChunk * K + i * 8) =
        Load128(queries + tile_row * (K + 8) + tile_column);
  }
}

// blockIdx.x: a chunk slot of the piece; blockIdx.y: a key head.
template <int K>
__global__ void __launch_bounds__(kPrepareThreads, 2) DeltaPrepareKernel(const DeltaArgs p) {
  constexpr int kPitch = K + 8;
  extern __shared__ uint4 shared[];
  __shared__ PrepareRows rows;
  const ChunkPlace place = PlaceOfSlot(p.batch, p.first_record + blockIdx.x);
  if (place.rows == 0) return;
  auto* keys = reinterpret_cast<__half*>(shared);
  __half* queries = keys + kChunk * kPitch;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, key_head = blockIdx.y;
  {
    const int row = threadIdx.x / 2 % kChunk;
    const bool is_query = threadIdx.x >= 2 * kChunk, is_there = row < place.rows;
    const int64_t token = place.begin + (is_there ? row : 0);
    const __half* from = is_query ? p.q + token * p.q_stride : p.k + token * p.k_stride;
    PrepareRow<K>(from + key_head * K, is_there, p.normalize,
                  (is_query ? queries : keys) + row * kPitch,
                  &(is_query ? rows.q_rest : rows.k_rest)[row]);
  }
  __syncthreads();
  StoreOperands<K>(keys, queries,
                   p.key_records + (static_cast<int64_t>(blockIdx.x) * p.k_heads + key_head) *
                                       KeyRecordHalves(K));
  float key_sums[kJobsOfWarp][8] = {}, query_sums[kJobsOfWarp][8] = {};
#pragma unroll
  for (int j = 0; j < kJobsOfWarp; ++j) {
    if (j * kPrepareWarps + warp >= kJobs) break;
    const Job job = JobOf(j * kPrepareWarps + warp);
    const int row = (job.row * 16 + TileRowOfLane(lane)) * kPitch;
    const int column = (job.column * 16 + TileColumnOfLane(lane)) * kPitch;
#pragma unroll 4
    for (int k = 0; k < K; k += 8) {
      const uint4 right = Load128(keys + column + k);
      MmaTile8(key_sums[j], Load128(keys + row + k), right);
      MmaTile8(query_sums[j], Load128(queries + row + k), right);
    }
  }
  auto* m = reinterpret_cast<float*>(shared);
  float* t = m + kChunk * kSquarePitch;
#pragma unroll 1
  for (int i = 0; i < p.ratio; ++i) {
    const int head = key_head * p.ratio + i;
    ChunkRecord* record = p.records + static_cast<int64_t>(blockIdx.x) * p.v_heads + head;
    __syncthreads();  // the squares take the place of keys and queries, or of the last head's
    PrepareGates(p, place, head, rows);
#pragma unroll
    for (int j = 0; j < kJobsOfWarp; ++j) {
      if (j * kPrepareWarps + warp >= kJobs) break;
      StoreSums(JobOf(j * kPrepareWarps + warp), lane, key_sums[j], m);
      StoreSums(JobOf(j * kPrepareWarps + warp), lane, query_sums[j], t);
    }
    __syncthreads();
    DecaySquares(rows, m, t, record->scores);
    __syncthreads();
    Invert(m, t);
    StoreInverse(t, rows, record->inverse);
    StoreFactors(rows, record);
  }
}

template <int K>
cudaError_t Launch(const DeltaArgs& p, cudaStream_t stream) {
  constexpr int kShared = PrepareSharedBytes<K>();
  static_assert(kShared <= 48 * 1024, "more needs an attribute of the kernel");
  const dim3 grid(static_cast<unsigned>(p.record_count), static_cast<unsigned>(p.k_heads));
  DeltaPrepareKernel<K><<<grid, kPrepareThreads, kShared, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchDeltaPrepare(const DeltaArgs& p, int64_t k_dim, cudaStream_t stream) {
  return k_dim == 64 ? Launch<64>(p, stream) : Launch<128>(p, stream);
}

}  // namespace nvfp4
