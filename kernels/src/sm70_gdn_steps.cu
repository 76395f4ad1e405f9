// The gated delta rule token by token: decode, and sequences too short for chunks.
//
// Eight lanes own one row of the state, so a warp's 16-byte loads cover four rows of 128 bytes each
// and a row's sums take three exchanges. With S the state before the token, d = exp(g):
//   u = beta (v - d S k),  S' = d S + u k^T,  out = scale (d S q + u (k q))
// so both products with the state come from the values as they were loaded: each element is read
// once and written once. No shared memory, no barrier. Limit of decode: the bandwidth of the state.
#include "device/gdn.cuh"

namespace nvfp4 {
namespace {

constexpr int kLanesOfRow = 8;
constexpr int kGateTokens = 32;  // a lane computes the gates of one token, for the whole warp

template <int kPieces>
struct KeyRow {
  float4 v[kPieces];
};

// Elements 4 lane + 32 j of a row of K halves.
template <int kPieces>
__device__ __forceinline__ void LoadRow(const __half* row, int lane, uint2 (&raw)[kPieces]) {
#pragma unroll
  for (int j = 0; j < kPieces; ++j)
    raw[j] = *reinterpret_cast<const uint2*>(row + 4 * lane + 32 * j);
}

template <int kPieces>
__device__ __forceinline__ KeyRow<kPieces> RowOf(const uint2 (&raw)[kPieces]) {
  KeyRow<kPieces> row;
#pragma unroll
  for (int j = 0; j < kPieces; ++j) row.v[j] = LoadState(reinterpret_cast<const __half*>(&raw[j]));
  return row;
}

template <int kPieces>
__device__ __forceinline__ float Dot(const KeyRow<kPieces>& a, const KeyRow<kPieces>& b) {
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    sum.x = fmaf(a.v[j].x, b.v[j].x, sum.x);
    sum.y = fmaf(a.v[j].y, b.v[j].y, sum.y);
    sum.z = fmaf(a.v[j].z, b.v[j].z, sum.z);
    sum.w = fmaf(a.v[j].w, b.v[j].w, sum.w);
  }
  return (sum.x + sum.y) + (sum.z + sum.w);
}

__device__ __forceinline__ float RowSum(float value) {
#pragma unroll
  for (int step = kLanesOfRow / 2; step > 0; step /= 2)
    value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  return value;
}

// What a token needs from memory, loaded a token ahead.
template <int kPieces>
struct TokenInputs {
  uint2 q[kPieces], k[kPieces];
  __half v;
};

template <int kPieces>
__device__ __forceinline__ void LoadToken(const DeltaArgs& p, int64_t token, int head, int row,
                                          int lane, TokenInputs<kPieces>& in) {
  const int64_t key = head / p.ratio * (kPieces * 32);
  LoadRow(p.k + token * p.k_stride + key, lane, in.k);
  LoadRow(p.q + token * p.q_stride + key, lane, in.q);
  in.v = p.v[token * p.v_stride + static_cast<int64_t>(head) * p.v_dim + row];
}

template <int kPieces>
__device__ __forceinline__ float StepRow(const DeltaArgs& p, const TokenInputs<kPieces>& in,
                                         float decay, float beta, KeyRow<kPieces>& state) {
  const KeyRow<kPieces> k = RowOf(in.k), q = RowOf(in.q);
  const float remembered = RowSum(Dot(state, k)), seen = RowSum(Dot(state, q));
  const float match = RowSum(Dot(k, q));
  float k_factor = 1.0f, q_factor = p.scale;
  if (p.normalize) {
    k_factor = rsqrtf(RowSum(Dot(k, k)) + kKeyNormEps);
    q_factor *= rsqrtf(RowSum(Dot(q, q)) + kKeyNormEps);
  }
  // Of the normalised key: the factor meets the sum and the update, never the elements.
  const float update = beta * (__half2float(in.v) - decay * k_factor * remembered) * k_factor;
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    state.v[j].x = fmaf(update, k.v[j].x, decay * state.v[j].x);
    state.v[j].y = fmaf(update, k.v[j].y, decay * state.v[j].y);
    state.v[j].z = fmaf(update, k.v[j].z, decay * state.v[j].z);
    state.v[j].w = fmaf(update, k.v[j].w, decay * state.v[j].w);
  }
  return q_factor * fmaf(update, match, decay * seen);
}

// blockIdx.x: 16 rows of a head; blockIdx.y: the sequence, from `first`.
template <int kPieces, typename State>
__global__ void __launch_bounds__(kStepThreads) DeltaStepsKernel(const DeltaArgs p, int first) {
  const GdnSequence s = SequenceAt(p.batch, first + blockIdx.y);
  if (!s.is_used) return;
  const int blocks = p.v_dim / kStepRows, head = blockIdx.x / blocks;
  const int row = blockIdx.x % blocks * kStepRows + threadIdx.x / kLanesOfRow;
  const int lane = threadIdx.x % kLanesOfRow, warp_lane = threadIdx.x % 32;
  constexpr int kKeys = kPieces * 32;
  State* place = static_cast<State*>(p.state) + s.slot * p.state_slot_stride +
                 (static_cast<int64_t>(head) * p.v_dim + row) * kKeys;
  KeyRow<kPieces> state;
#pragma unroll
  for (int j = 0; j < kPieces; ++j)
    state.v[j] =
        s.has_state ? LoadState(place + 4 * lane + 32 * j) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  TokenInputs<kPieces> next;
  LoadToken(p, s.begin, head, row, lane, next);
  float decay = 0.0f, beta = 0.0f;
  for (int token = s.begin; token < s.end; ++token) {
    const int at = (token - s.begin) % kGateTokens;
    if (at == 0) {
      const GdnGates gates = GatesAt(p, min(token + warp_lane, s.end - 1), head);
      decay = expf(gates.log_decay);
      beta = gates.beta;
    }
    const TokenInputs<kPieces> in = next;
    if (token + 1 < s.end) LoadToken(p, token + 1, head, row, lane, next);
    const float out = StepRow(p, in, __shfl_sync(0xFFFFFFFFu, decay, at),
                              __shfl_sync(0xFFFFFFFFu, beta, at), state);
    if (lane == 0)
      p.out[token * p.out_stride + static_cast<int64_t>(head) * p.v_dim + row] =
          __float2half_rn(out);
  }
#pragma unroll
  for (int j = 0; j < kPieces; ++j) StoreState(place + 4 * lane + 32 * j, state.v[j]);
}

template <int kPieces>
void Launch(const DeltaArgs& p, int first, const dim3& grid, cudaStream_t stream) {
  if (p.is_state_half) {
    DeltaStepsKernel<kPieces, __half><<<grid, kStepThreads, 0, stream>>>(p, first);
  } else {
    DeltaStepsKernel<kPieces, float><<<grid, kStepThreads, 0, stream>>>(p, first);
  }
}

}  // namespace

cudaError_t LaunchDeltaSteps(const DeltaArgs& p, int first, int count, int64_t k_dim,
                             cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.v_heads * (p.v_dim / kStepRows)),
                  static_cast<unsigned>(count));
  if (k_dim == 64) {
    Launch<2>(p, first, grid, stream);
  } else {
    Launch<4>(p, first, grid, stream);
  }
  return cudaGetLastError();
}

}  // namespace nvfp4
