// The kernel that runs the state through the chunks of a sequence, and its launch.
#include "sm70_gdn_chunk.cuh"

namespace nvfp4 {
namespace {

// Two neighbours of a row of 16-bit values, or zeros.
__device__ __forceinline__ float2 LoadPair(const __half* from, bool is_there) {
  return is_there ? __half22float2(*reinterpret_cast<const __half2*>(from))
                  : make_float2(0.0f, 0.0f);
}

// What a lane needs of a chunk beside operands: it has two rows of sums, and pairs of columns.
struct ChunkRows {
  int row[2];
  float k_out[2], q_out[2];
  float2 value[4];  // pair i / 2 of the sums
};

__device__ __forceinline__ ChunkRows LoadRows(const DeltaArgs& p, const ChunkInputs& in,
                                              const ChunkWarp& warp) {
  ChunkRows found;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    found.row[e] = warp.rows + TileSumRow(warp.lane, 2 * e);
    found.k_out[e] = in.record->k_out[found.row[e]];
    found.q_out[e] = in.record->q_out[found.row[e]];
  }
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const int at = found.row[i / 2 % 2];
    const int column = warp.values + TileSumColumn(warp.lane, i);
    found.value[i / 2] =
        LoadPair(in.values + (at * static_cast<int>(p.v_stride) + column), at < in.rows);
  }
  return found;
}

// One chunk; its keys are in `pieces`, and those of the next one after it, unless it is the last of
// this launch.
template <int K>
__device__ __forceinline__ void RunChunk(const DeltaArgs& p, const ChunkInputs& in,
                                         const ChunkShared<K>& shared, bool is_last,
                                         KeyPieces<K>& pieces, StateTiles<K>& state) {
  const ChunkWarp warp = ThisWarp(K);
  const __half* queries =
      in.keys + (kChunk * K + OperandOffset(warp.rows + TileRowOfLane(warp.lane), 0, K));
  const QueryPieces first = LoadQueries(queries);
  StoreKeyPieces<K>(pieces, shared.keys);
  PublishState<K>(shared, warp, state);
  __syncthreads();
  float keys[8] = {}, sums[8] = {};
  StateProducts<K>(shared, warp, queries, first, keys, sums);
  const SquareRows inverse = LoadSquare(in.record->inverse, warp);
  const ChunkRows rows = LoadRows(p, in, warp);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float value = i & 1 ? rows.value[i / 2].y : rows.value[i / 2].x;
    keys[i] = fmaf(-rows.k_out[i / 2 % 2], keys[i], value);
    sums[i] *= rows.q_out[i / 2 % 2];
  }
  StorePairs(shared.wanted, warp, keys, 1.0f, 1.0f);
  __syncthreads();
  float update[8] = {};
  SquareProduct(inverse, shared.wanted, warp, update);
  StorePairs(shared.update, warp, update, 1.0f, 1.0f);
  StorePairs(shared.tail, warp, update, in.record->tail[rows.row[0]], in.record->tail[rows.row[1]]);
  __syncthreads();
  const SquareRows scores = LoadSquare(in.record->scores, warp);
  AdvanceState<K>(shared, warp, in.record->decay[kChunk - 1], state);
  if (!is_last) LoadKeyPieces<K>(in.keys + p.k_heads * KeyRecordHalves(K), pieces);
  SquareProduct(scores, shared.update, warp, sums);
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const int at = rows.row[i / 2 % 2], column = warp.values + TileSumColumn(warp.lane, i);
    if (at < in.rows)
      *reinterpret_cast<__half2*>(in.out + (at * static_cast<int>(p.out_stride) + column)) =
          __floats2half2_rn(sums[i] * p.scale, sums[i + 1] * p.scale);
  }
  __syncthreads();
}

// The CTA's rows of a slot; computed anew where it is called, see ThisWarp.
template <int K, typename State>
__device__ __forceinline__ State* PlaceOfState(const DeltaArgs& p, int slot) {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return static_cast<State*>(p.state) + slot * p.state_slot_stride +
         static_cast<int64_t>(block) * (kChunkValues * K);
}

template <int K>
__device__ __forceinline__ const __half* KeysOf(const DeltaArgs& p, int record, int key_head) {
  return p.key_records + (static_cast<int64_t>(record) * p.k_heads + key_head) * KeyRecordHalves(K);
}

// blockIdx.x: 32 state rows of a head; blockIdx.y: a sequence behind the decode sequences.
template <int K, typename State>
__global__ void __launch_bounds__(kChunkThreads, 2) DeltaChunkKernel(const DeltaArgs p) {
  extern __shared__ uint4 memory[];
  const int index = p.batch.decode_sequences + blockIdx.y;
  const GdnSequence s = SequenceAt(p.batch, index);
  const int slot = s.begin / kChunk + index;  // of the sequence's first chunk
  const int chunks = (s.end - s.begin + kChunk - 1) / kChunk;
  const int first = max(p.first_record - slot, 0);
  const int last = min(p.first_record + p.record_count - slot, chunks);
  if (!s.is_used || first >= last) return;
  const int blocks = p.v_dim / kChunkValues, head = blockIdx.x / blocks;
  const int value = static_cast<int>(blockIdx.x) * kChunkValues, key_head = head / p.ratio;
  const int stop = s.begin + last * kChunk;  // of this piece
  ChunkShared<K> shared;
  shared.keys = reinterpret_cast<__half*>(memory);
  shared.state = shared.keys + kChunk * (K + 8);
  shared.wanted = shared.state + kChunkValues * (K + 8);
  shared.update = shared.wanted + kChunk * kValuePitch;
  shared.tail = shared.update + kChunk * kValuePitch;
  StateTiles<K> state;
  ReadState<K>(PlaceOfState<K, State>(p, s.slot), ThisWarp(K), s.has_state || first > 0, state);
  int record = slot + first - p.first_record, token = s.begin + first * kChunk;
  KeyPieces<K> pieces;
  LoadKeyPieces<K>(KeysOf<K>(p, record, key_head), pieces);
#pragma unroll 1
  for (; token < stop; token += kChunk, ++record) {
    ChunkInputs in;
    in.record = p.records + static_cast<int64_t>(record) * p.v_heads + head;
    in.keys = KeysOf<K>(p, record, key_head);
    in.values = p.v + token * p.v_stride + value;
    in.out = p.out + token * p.out_stride + value;
    in.rows = s.end - token;
    RunChunk<K>(p, in, shared, token + kChunk >= stop, pieces, state);
  }
  WriteState<K>(PlaceOfState<K, State>(p, s.slot), ThisWarp(K), state);
}

template <int K, typename State>
cudaError_t Launch(const DeltaArgs& p, cudaStream_t stream) {
  constexpr int kShared = ChunkSharedBytes<K>();
  static_assert(kShared <= 48 * 1024, "more needs an attribute of the kernel");
  const dim3 grid(static_cast<unsigned>(p.v_heads * (p.v_dim / kChunkValues)),
                  static_cast<unsigned>(p.batch.sequences - p.batch.decode_sequences));
  DeltaChunkKernel<K, State><<<grid, kChunkThreads, kShared, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchDeltaChunks(const DeltaArgs& p, int64_t k_dim, cudaStream_t stream) {
  if (p.is_state_half)
    return k_dim == 64 ? Launch<64, __half>(p, stream) : Launch<128, __half>(p, stream);
  return k_dim == 64 ? Launch<64, float>(p, stream) : Launch<128, float>(p, stream);
}

}  // namespace nvfp4
