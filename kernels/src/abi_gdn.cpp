// The gated delta rule, its convolution and its norm in the sm_70 library.
#include <algorithm>
#include <cinttypes>

#include "abi.h"
#include "check_gdn.h"
#include "gdn_args.h"

namespace nvfp4::sm70 {
namespace {

nvfp4_status CheckDeltaSupported(const nvfp4_delta& d) {
  NVFP4_TRY(CheckHalves("the delta rule", d.io_type));
  for (const int64_t size : {d.k_dim, d.v_dim}) {
    if (size != 64 && size != 128) {
      return Fail(NVFP4_EUNSUPPORTED,
                  "this library has kernels for heads of 64 and 128, not %" PRId64 ".", size);
    }
  }
  return NVFP4_OK;
}

// Offsets inside of a chunk are 32-bit.
constexpr int64_t kRowStrideLimit = INT64_C(1) << 24;

nvfp4_status CheckDeltaStrides(const nvfp4_delta& d) {
  const int64_t longest = std::max(d.v_stride, d.out_stride);
  if (longest > kRowStrideLimit) {
    return Fail(NVFP4_EUNSUPPORTED, "rows of v or out are %" PRId64 " elements apart, over 2^24.",
                longest);
  }
  return NVFP4_OK;
}

template <typename Call>
GdnBatch BatchOf(const Call& call) {
  GdnBatch batch{};
  batch.query_start = call.query_start;
  batch.slots = call.slots;
  batch.has_initial_state = call.has_initial_state;
  batch.sequences = static_cast<int32_t>(call.sequences);
  batch.decode_sequences = static_cast<int32_t>(call.decode_sequences);
  batch.first_slot = static_cast<int32_t>(call.first_slot);
  batch.slot_count = static_cast<int32_t>(call.slot_count);
  return batch;
}

ConvArgs ArgsOf(const nvfp4_conv& c) {
  ConvArgs args{};
  args.batch = BatchOf(c);
  args.x = static_cast<const __half*>(c.x);
  args.y = static_cast<__half*>(c.y);
  args.weight = c.weight;
  args.bias = c.bias;
  args.state = c.state;
  args.x_stride = c.x_stride;
  args.y_stride = c.y_stride;
  args.state_slot_stride = c.state_slot_stride;
  args.state_channel_stride = c.state_channel_stride;
  args.state_time_stride = c.state_time_stride;
  args.tokens = static_cast<int32_t>(c.tokens);
  args.channels = static_cast<int32_t>(c.channels);
  args.is_state_half = c.state_type == NVFP4_F16;
  args.is_weight_half = c.weight_type == NVFP4_F16;
  args.silu = c.silu != 0;
  return args;
}

DeltaArgs ArgsOf(const nvfp4_delta& d, void* workspace) {
  DeltaArgs args{};
  args.batch = BatchOf(d);
  args.q = static_cast<const __half*>(d.q);
  args.k = static_cast<const __half*>(d.k);
  args.v = static_cast<const __half*>(d.v);
  args.out = static_cast<__half*>(d.out);
  args.a = d.a;
  args.b = d.b;
  args.a_log = d.a_log;
  args.dt_bias = d.dt_bias;
  args.state = d.state;
  args.records = static_cast<ChunkRecord*>(workspace);
  args.q_stride = d.q_stride;
  args.k_stride = d.k_stride;
  args.v_stride = d.v_stride;
  args.out_stride = d.out_stride;
  args.a_stride = d.a_stride;
  args.b_stride = d.b_stride;
  args.state_slot_stride = d.state_slot_stride;
  args.tokens = static_cast<int32_t>(d.tokens);
  args.k_heads = static_cast<int32_t>(d.k_heads);
  args.v_heads = static_cast<int32_t>(d.v_heads);
  args.ratio = static_cast<int32_t>(d.v_heads / d.k_heads);
  args.v_dim = static_cast<int32_t>(d.v_dim);
  args.scale = d.scale;
  args.are_gates_half = d.gate_type == NVFP4_F16;
  args.is_a_log_half = d.a_log_type == NVFP4_F16;
  args.is_dt_bias_half = d.dt_bias_type == NVFP4_F16;
  args.is_state_half = d.state_type == NVFP4_F16;
  args.normalize = d.normalize != 0;
  return args;
}

// Chunks of all sequences behind the decode sequences, one piece of the workspace after the other.
nvfp4_status RunChunks(DeltaArgs args, const DeltaPlan& plan, int64_t k_dim, void* stream) {
  args.key_records =
      reinterpret_cast<__half*>(reinterpret_cast<char*>(args.records) + plan.record_bytes);
  for (int64_t first = 0; first < plan.chunk_slots; first += plan.piece_slots) {
    args.first_record = static_cast<int32_t>(first);
    args.record_count = static_cast<int32_t>(std::min(plan.piece_slots, plan.chunk_slots - first));
    NVFP4_TRY(CheckCuda(LaunchDeltaPrepare(args, k_dim, StreamOf(stream)), "chunks of the delta"));
    NVFP4_TRY(CheckCuda(LaunchDeltaChunks(args, k_dim, StreamOf(stream)), "chunks of the delta"));
  }
  return NVFP4_OK;
}

}  // namespace
}  // namespace nvfp4::sm70

using namespace nvfp4;
using namespace nvfp4::sm70;

extern "C" {

nvfp4_status nvfp4_causal_conv(const nvfp4_conv* conv, void* stream) {
  NVFP4_TRY(CheckConv(conv));
  NVFP4_TRY(CheckHalves("the convolution", conv->io_type));
  return CheckCuda(LaunchConv(ArgsOf(*conv), conv->width, StreamOf(stream)), "causal_conv");
}

nvfp4_status nvfp4_gated_delta_workspace_bytes(const nvfp4_delta* delta, int64_t* bytes) {
  NVFP4_TRY(CheckDeltaSizes(delta));
  NVFP4_TRY(CheckDeltaSupported(*delta));
  NVFP4_TRY(CheckAligned("bytes", bytes, alignof(int64_t)));
  *bytes = PlanDelta(*delta).workspace_bytes;
  return NVFP4_OK;
}

nvfp4_status nvfp4_gated_delta(const nvfp4_delta* delta, void* workspace, int64_t workspace_bytes,
                               void* stream) {
  NVFP4_TRY(CheckDeltaSizes(delta));
  const nvfp4_delta& d = *delta;
  NVFP4_TRY(CheckDeltaSupported(d));
  NVFP4_TRY(CheckDelta(d));
  NVFP4_TRY(CheckDeltaStrides(d));
  const DeltaPlan plan = PlanDelta(d);
  NVFP4_TRY(CheckWorkspace({workspace, workspace_bytes, plan.workspace_bytes}));
  const DeltaArgs args = ArgsOf(d, workspace);
  const int steps = plan.chunked ? args.batch.decode_sequences : args.batch.sequences;
  if (steps > 0) {
    NVFP4_TRY(CheckCuda(LaunchDeltaSteps(args, 0, steps, d.k_dim, StreamOf(stream)),
                        "steps of the delta"));
  }
  return plan.chunked ? RunChunks(args, plan, d.k_dim, stream) : NVFP4_OK;
}

nvfp4_status nvfp4_gated_rms_norm(const nvfp4_gate_norm* norm, void* stream) {
  NVFP4_TRY(CheckGateNorm(norm));
  return CheckCuda(LaunchGatedNorm(*norm, StreamOf(stream)), "gated_rms_norm");
}

}  // extern "C"
