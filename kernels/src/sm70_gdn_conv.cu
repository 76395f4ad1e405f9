// The causal convolution in front of the gated delta rule: a thread owns two channels and walks
// tokens with the window in registers, bound by launch and bandwidth.
//
// Decode: a CTA of 256 channels takes a token and rolls the state. Behind it: tiles of 16 tokens
// that read what came before from x or from the state, and a second launch that writes the states,
// because a state is read by the first tile of its sequence and belongs to the last tokens.
#include "device/gdn.cuh"

namespace nvfp4 {
namespace {

__device__ __forceinline__ void StoreAs(bool is_half, void* data, int64_t i, float v) {
  if (is_half) {
    static_cast<__half*>(data)[i] = __float2half_rn(v);
  } else {
    static_cast<float*>(data)[i] = v;
  }
}

// What two channels keep in registers.
template <int kWidth>
struct Taps {
  float2 weight[kWidth], bias;
  float2 window[kWidth];  // inputs, the oldest first; the last is the current one
};

template <int kWidth>
__device__ __forceinline__ void LoadTaps(const ConvArgs& p, int channel, Taps<kWidth>& taps) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    taps.weight[j].x = LoadAs(p.is_weight_half, p.weight, channel * kWidth + j);
    taps.weight[j].y = LoadAs(p.is_weight_half, p.weight, (channel + 1) * kWidth + j);
  }
  taps.bias = make_float2(0.0f, 0.0f);
  if (p.bias) {
    taps.bias.x = LoadAs(p.is_weight_half, p.bias, channel);
    taps.bias.y = LoadAs(p.is_weight_half, p.bias, channel + 1);
  }
}

__device__ __forceinline__ int64_t StatePlace(const ConvArgs& p, int slot, int channel) {
  return slot * p.state_slot_stride + channel * p.state_channel_stride;
}

// Input `at` of a sequence, counted from its first token; before it lies the state.
template <int kWidth>
__device__ __forceinline__ float2 InputAt(const ConvArgs& p, const GdnSequence& s, int channel,
                                          int at) {
  if (at >= 0) {
    const __half* x = p.x + (s.begin + at) * p.x_stride + channel;
    return __half22float2(*reinterpret_cast<const __half2*>(x));
  }
  if (!s.has_state) return make_float2(0.0f, 0.0f);
  const int64_t i = StatePlace(p, s.slot, channel) + (kWidth - 1 + at) * p.state_time_stride;
  return make_float2(LoadAs(p.is_state_half, p.state, i),
                     LoadAs(p.is_state_half, p.state, i + p.state_channel_stride));
}

template <int kWidth>
__device__ __forceinline__ void WriteState(const ConvArgs& p, const GdnSequence& s, int channel,
                                           const float2 (&last)[kWidth - 1]) {
  const int64_t place = StatePlace(p, s.slot, channel);
#pragma unroll
  for (int j = 0; j < kWidth - 1; ++j) {
    const int64_t i = place + j * p.state_time_stride;
    StoreAs(p.is_state_half, p.state, i, last[j].x);
    StoreAs(p.is_state_half, p.state, i + p.state_channel_stride, last[j].y);
  }
}

template <int kWidth>
__device__ __forceinline__ void Output(const ConvArgs& p, const Taps<kWidth>& taps, int64_t token,
                                       int channel) {
  float2 sum = taps.bias;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    sum.x = fmaf(taps.weight[j].x, taps.window[j].x, sum.x);
    sum.y = fmaf(taps.weight[j].y, taps.window[j].y, sum.y);
  }
  if (p.silu) sum = make_float2(SiluOf(sum.x), SiluOf(sum.y));
  *reinterpret_cast<__half2*>(p.y + token * p.y_stride + channel) = __floats2half2_rn(sum.x, sum.y);
}

template <int kWidth>
__device__ __forceinline__ void Roll(Taps<kWidth>& taps) {
#pragma unroll
  for (int j = 0; j < kWidth - 1; ++j) taps.window[j] = taps.window[j + 1];
}

template <int kWidth>
__device__ __forceinline__ void OneToken(const ConvArgs& p, int sequence, int channel) {
  const GdnSequence s = SequenceAt(p.batch, sequence);
  if (!s.is_used) return;
  Taps<kWidth> taps;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) taps.window[j] = InputAt<kWidth>(p, s, channel, j - kWidth + 1);
  LoadTaps(p, channel, taps);
  Output(p, taps, s.begin, channel);
  Roll(taps);
  float2 last[kWidth - 1];
#pragma unroll
  for (int j = 0; j < kWidth - 1; ++j) last[j] = taps.window[j];
  WriteState<kWidth>(p, s, channel, last);
}

// The sequence that holds row `token`: the last that begins at or before it and is not empty.
__device__ __forceinline__ int SequenceOfRow(const GdnBatch& batch, int token) {
  int low = 0, high = batch.sequences;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (batch.query_start[middle] <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <int kWidth>
__device__ __forceinline__ void TileOfTokens(const ConvArgs& p, int tile, int channel) {
  const int last = min(p.tokens, p.batch.query_start[p.batch.sequences]);
  int token = max(tile * kConvTokens, p.batch.query_start[p.batch.decode_sequences]);
  const int stop = min(tile * kConvTokens + kConvTokens, last);
  if (token >= stop) return;
  Taps<kWidth> taps;
  LoadTaps(p, channel, taps);
  for (int index = SequenceOfRow(p.batch, token); token < stop; ++index) {
    const GdnSequence s = SequenceAt(p.batch, index);
    const int end = min(s.end, stop);
    if (!s.is_used) {
      token = max(token, end);
      continue;
    }
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j)
      taps.window[j] = InputAt<kWidth>(p, s, channel, token - s.begin + j - kWidth + 1);
    while (token < end) {
      constexpr int kAhead = 4;
      float2 next[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (token + i < end) next[i] = InputAt<kWidth>(p, s, channel, token + i - s.begin);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (token + i >= end) break;
        taps.window[kWidth - 1] = next[i];
        Output(p, taps, token + i, channel);
        Roll(taps);
      }
      token = min(token + kAhead, end);
    }
  }
}

// blockIdx.x: decode sequences, then tiles of tokens.
template <int kWidth>
__global__ void __launch_bounds__(kConvThreads) ConvKernel(const ConvArgs p) {
  const int channel = (blockIdx.y * kConvThreads + threadIdx.x) * kConvChannels;
  if (channel >= p.channels) return;
  const int index = blockIdx.x;
  if (index < p.batch.decode_sequences) {
    OneToken<kWidth>(p, index, channel);
  } else {
    TileOfTokens<kWidth>(p, index - p.batch.decode_sequences, channel);
  }
}

// The states of the sequences behind the decode sequences; all is read before anything is written.
template <int kWidth>
__global__ void __launch_bounds__(kConvThreads) ConvStateKernel(const ConvArgs p) {
  const int channel = (blockIdx.y * kConvThreads + threadIdx.x) * kConvChannels;
  if (channel >= p.channels) return;
  const GdnSequence s = SequenceAt(p.batch, p.batch.decode_sequences + blockIdx.x);
  if (!s.is_used) return;
  float2 last[kWidth - 1];
#pragma unroll
  for (int j = 0; j < kWidth - 1; ++j)
    last[j] = InputAt<kWidth>(p, s, channel, s.end - s.begin - kWidth + 1 + j);
  WriteState<kWidth>(p, s, channel, last);
}

template <int kWidth>
cudaError_t Launch(const ConvArgs& p, cudaStream_t stream) {
  const auto columns = static_cast<unsigned>(CeilDiv(p.channels, kConvThreads * kConvChannels));
  const int rest = p.batch.sequences - p.batch.decode_sequences;
  const int64_t tiles = rest > 0 ? CeilDiv(p.tokens, kConvTokens) : 0;
  const auto rows = static_cast<unsigned>(p.batch.decode_sequences + tiles);
  ConvKernel<kWidth><<<dim3(rows, columns), kConvThreads, 0, stream>>>(p);
  if (rest > 0)
    ConvStateKernel<kWidth>
        <<<dim3(static_cast<unsigned>(rest), columns), kConvThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchConv(const ConvArgs& args, int width, cudaStream_t stream) {
  return width == 2   ? Launch<2>(args, stream)
         : width == 3 ? Launch<3>(args, stream)
                      : Launch<4>(args, stream);
}

}  // namespace nvfp4
