// The gated delta rule on host memory: token by token, in FP64.
#include "gdn.h"

#include "check_gdn.h"

namespace nvfp4::host {
namespace {

constexpr double kSoftplusThreshold = 20.0;
constexpr double kNormEps = 1e-6;

// What one token multiplies and adds.
struct Gates {
  double decay, beta;
};

Gates GatesOf(const nvfp4_delta& d, int64_t token, int64_t head) {
  const double x = static_cast<double>(Load(d.gate_type, d.a, token * d.a_stride + head)) +
                   static_cast<double>(Load(d.dt_bias_type, d.dt_bias, head));
  const double softplus = x > kSoftplusThreshold ? x : std::log1p(std::exp(x));
  const double rate = std::exp(static_cast<double>(Load(d.a_log_type, d.a_log, head)));
  const auto b = static_cast<double>(Load(d.gate_type, d.b, token * d.b_stride + head));
  return {std::exp(-rate * softplus), Sigmoid(b)};
}

// A row of q or k as FP64, times `factor`, and divided by its norm.
void LoadKey(const nvfp4_delta& d, const void* data, int64_t first, double factor, double* row) {
  double squares = 0.0;
  for (int64_t i = 0; i < d.k_dim; ++i) {
    row[i] = static_cast<double>(Load(d.io_type, data, first + i));
    squares += row[i] * row[i];
  }
  const double scale = d.normalize != 0 ? factor / std::sqrt(squares + kNormEps) : factor;
  for (int64_t i = 0; i < d.k_dim; ++i) {
    row[i] *= scale;
  }
}

// One row of the state takes one token; gives its element of out.
double StepRow(double* state, const double* q, const double* k, const Gates& gates, double v,
               int64_t k_dim) {
  double remembered = 0.0;
  for (int64_t i = 0; i < k_dim; ++i) {
    state[i] *= gates.decay;
    remembered += state[i] * k[i];
  }
  const double update = gates.beta * (v - remembered);
  double out = 0.0;
  for (int64_t i = 0; i < k_dim; ++i) {
    state[i] += update * k[i];
    out += state[i] * q[i];
  }
  return out;
}

// One head of one sequence. Scratch: the state, then a row of q and one of k.
void RunHead(const nvfp4_delta& d, const Sequence& sequence, int64_t head, double* scratch) {
  const int64_t elements = d.v_dim * d.k_dim, key_head = head / (d.v_heads / d.k_heads);
  const int64_t place = sequence.slot * d.state_slot_stride + head * elements;
  double *state = scratch, *q = state + elements, *k = q + d.k_dim;
  for (int64_t i = 0; i < elements; ++i) {
    state[i] = sequence.has_initial_state
                   ? static_cast<double>(Load(d.state_type, d.state, place + i))
                   : 0.0;
  }
  for (int64_t token = sequence.begin; token < sequence.end; ++token) {
    const int64_t row = key_head * d.k_dim;
    LoadKey(d, d.q, token * d.q_stride + row, static_cast<double>(d.scale), q);
    LoadKey(d, d.k, token * d.k_stride + row, 1.0, k);
    const Gates gates = GatesOf(d, token, head);
    for (int64_t i = 0; i < d.v_dim; ++i) {
      const int64_t at = head * d.v_dim + i;
      const auto v = static_cast<double>(Load(d.io_type, d.v, token * d.v_stride + at));
      Store(d.io_type, d.out, token * d.out_stride + at,
            StepRow(state + i * d.k_dim, q, k, gates, v, d.k_dim));
    }
  }
  for (int64_t i = 0; i < elements; ++i) {
    Store(d.state_type, d.state, place + i, state[i]);
  }
}

int64_t ScratchElements(const nvfp4_delta& d) { return (d.v_dim + 2) * d.k_dim; }

}  // namespace
}  // namespace nvfp4::host

using namespace nvfp4;
using namespace nvfp4::host;

extern "C" {

nvfp4_status nvfp4_gated_delta_workspace_bytes(const nvfp4_delta* delta, int64_t* bytes) {
  NVFP4_TRY(CheckDeltaSizes(delta));
  NVFP4_TRY(CheckAligned("bytes", bytes, alignof(int64_t)));
  *bytes = RoundUp(ScratchElements(*delta) * kMaxWorkers * static_cast<int64_t>(sizeof(double)),
                   NVFP4_BUFFER_ALIGNMENT);
  return NVFP4_OK;
}

nvfp4_status nvfp4_gated_delta(const nvfp4_delta* delta, void* workspace, int64_t workspace_bytes,
                               void* /*stream*/) {
  int64_t needed = 0;
  NVFP4_TRY(nvfp4_gated_delta_workspace_bytes(delta, &needed));
  const nvfp4_delta& d = *delta;
  NVFP4_TRY(CheckDelta(d));
  NVFP4_TRY(CheckWorkspace({workspace, workspace_bytes, needed}));
  const int64_t rows = d.sequences * d.v_heads, scratch = ScratchElements(d);
  const int64_t cost = (d.tokens / d.sequences + 1) * d.v_dim * d.k_dim;
  auto* memory = static_cast<double*>(workspace);
  ForRows(rows, WorkersFor(rows, cost, kMaxWorkers), [&](int worker, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Sequence sequence = SequenceOf(d, row / d.v_heads);
      if (sequence.is_used) {
        RunHead(d, sequence, row % d.v_heads, memory + worker * scratch);
      }
    }
  });
  return NVFP4_OK;
}

}  // extern "C"
