// The causal convolution in front of the gated delta rule, and the gated norm behind it, in FP64.
#include <algorithm>
#include <cmath>

#include "check_gdn.h"
#include "gdn.h"

namespace nvfp4::host {
namespace {

constexpr int kMostWidth = 4;

// One channel of one sequence.
void ConvChannel(const nvfp4_conv& c, const Sequence& sequence, int64_t channel) {
  const int64_t history = c.width - 1;
  const int64_t place = sequence.slot * c.state_slot_stride + channel * c.state_channel_stride;
  double window[kMostWidth] = {};  // the inputs that one output sees, the oldest first
  double weight[kMostWidth];
  for (int64_t j = 0; j < history; ++j) {
    window[j] =
        sequence.has_initial_state
            ? static_cast<double>(Load(c.state_type, c.state, place + j * c.state_time_stride))
            : 0.0;
  }
  for (int64_t j = 0; j < c.width; ++j) {
    weight[j] = static_cast<double>(Load(c.weight_type, c.weight, channel * c.width + j));
  }
  const double bias =
      c.bias == nullptr ? 0.0 : static_cast<double>(Load(c.weight_type, c.bias, channel));
  for (int64_t token = sequence.begin; token < sequence.end; ++token) {
    window[history] = static_cast<double>(Load(c.io_type, c.x, token * c.x_stride + channel));
    double sum = bias;
    for (int64_t j = 0; j < c.width; ++j) {
      sum += weight[j] * window[j];
    }
    Store(c.io_type, c.y, token * c.y_stride + channel, c.silu != 0 ? Silu(sum) : sum);
    std::copy(window + 1, window + c.width, window);
  }
  for (int64_t j = 0; j < history; ++j) {
    Store(c.state_type, c.state, place + j * c.state_time_stride, window[j]);
  }
}

void NormHead(const nvfp4_gate_norm& n, int64_t token, int64_t head) {
  const int64_t x = token * n.x_stride + head * n.hidden, z = token * n.z_stride + head * n.hidden;
  const int64_t y = token * n.y_stride + head * n.hidden;
  double squares = 0.0;
  for (int64_t i = 0; i < n.hidden; ++i) {
    const auto value = static_cast<double>(Load(n.io_type, n.x, x + i));
    squares += value * value;
  }
  const double mean = squares / static_cast<double>(n.hidden);
  const double inverse = 1.0 / std::sqrt(mean + static_cast<double>(n.eps));
  for (int64_t i = 0; i < n.hidden; ++i) {
    const auto gate = static_cast<double>(Load(n.io_type, n.z, z + i));
    const double factor = n.gate == NVFP4_GATE_SILU ? Silu(gate) : Sigmoid(gate);
    const double normed = static_cast<double>(Load(n.io_type, n.x, x + i)) * inverse *
                          static_cast<double>(Load(n.weight_type, n.weight, i));
    Store(n.io_type, n.y, y + i, normed * factor);
  }
}

}  // namespace
}  // namespace nvfp4::host

using namespace nvfp4;
using namespace nvfp4::host;

extern "C" {

nvfp4_status nvfp4_causal_conv(const nvfp4_conv* conv, void* /*stream*/) {
  NVFP4_TRY(CheckConv(conv));
  const nvfp4_conv& c = *conv;
  const int64_t cost = c.tokens / c.sequences * c.width;
  const int64_t rows = c.sequences * c.channels;
  ForRows(rows, WorkersFor(rows, cost, kMaxThreads), [&](int, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Sequence sequence = SequenceOf(c, row / c.channels);
      if (sequence.is_used) {
        ConvChannel(c, sequence, row % c.channels);
      }
    }
  });
  return NVFP4_OK;
}

nvfp4_status nvfp4_gated_rms_norm(const nvfp4_gate_norm* norm, void* /*stream*/) {
  NVFP4_TRY(CheckGateNorm(norm));
  const nvfp4_gate_norm& n = *norm;
  const int64_t rows = n.tokens * n.heads;
  ForRows(rows, WorkersFor(rows, n.hidden, kMaxThreads), [&](int, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      NormHead(n, row / n.heads, row % n.heads);
    }
  });
  return NVFP4_OK;
}

}  // extern "C"
