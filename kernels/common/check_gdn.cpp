// Checks of the gated delta rule, of the convolution in front of it and of the norm behind it.
#include "check_gdn.h"

#include <cinttypes>
#include <cmath>

#include "check_attention.h"

namespace nvfp4 {
namespace {

nvfp4_status CheckFloatType(const char* name, int32_t type) {
  if (type != NVFP4_F16 && type != NVFP4_F32) {
    return Fail(NVFP4_ETYPE, "%s must be NVFP4_F16 (1) or NVFP4_F32 (2), is %d.", name, type);
  }
  return NVFP4_OK;
}

nvfp4_status CheckFlag(const char* name, int32_t flag) {
  if (flag != 0 && flag != 1) {
    return Fail(NVFP4_ETYPE, "%s must be 0 or 1, is %d.", name, flag);
  }
  return NVFP4_OK;
}

nvfp4_status CheckEighths(const char* name, int64_t value, int64_t limit) {
  NVFP4_TRY(CheckSize(name, value, limit));
  if (value % 8 != 0) {
    return Fail(NVFP4_ESHAPE, "%s must be a multiple of 8, is %" PRId64 ".", name, value);
  }
  return NVFP4_OK;
}

nvfp4_status CheckBatch(int64_t tokens, int64_t sequences, int64_t decode_sequences) {
  NVFP4_TRY(CheckSize("tokens", tokens, kSizeLimit));
  NVFP4_TRY(CheckSize("sequences", sequences, kSequencesLimit));
  if (decode_sequences < 0 || decode_sequences > sequences) {
    return Fail(NVFP4_ESHAPE, "decode_sequences must be 0 to %" PRId64 ", is %" PRId64 ".",
                sequences, decode_sequences);
  }
  return NVFP4_OK;
}

nvfp4_status CheckSlots(const int32_t* query_start, const int32_t* slots, int64_t first_slot,
                        int64_t slot_count) {
  NVFP4_TRY(CheckAligned("query_start", query_start, alignof(int32_t)));
  NVFP4_TRY(CheckAligned("slots", slots, alignof(int32_t)));
  NVFP4_TRY(CheckSize("slot_count", slot_count, kSizeLimit));
  if (first_slot < 0 || first_slot > slot_count) {
    return Fail(NVFP4_ESHAPE, "first_slot must be 0 to %" PRId64 ", is %" PRId64 ".", slot_count,
                first_slot);
  }
  return NVFP4_OK;
}

nvfp4_status CheckHeadCounts(const nvfp4_delta& d) {
  NVFP4_TRY(CheckSize("k_heads", d.k_heads, kHeadsLimit));
  NVFP4_TRY(CheckSize("v_heads", d.v_heads, kHeadsLimit));
  if (d.v_heads % d.k_heads != 0) {
    return Fail(NVFP4_ESHAPE,
                "v_heads must be a multiple of the %" PRId64 " k_heads, is %" PRId64 ".", d.k_heads,
                d.v_heads);
  }
  NVFP4_TRY(CheckEighths("k_dim", d.k_dim, kGdnHeadDimLimit));
  return CheckEighths("v_dim", d.v_dim, kGdnHeadDimLimit);
}

}  // namespace

nvfp4_status CheckConv(const nvfp4_conv* conv) {
  NVFP4_TRY(CheckAligned("conv", conv, alignof(nvfp4_conv)));
  const nvfp4_conv& c = *conv;
  if (c.struct_size != sizeof(c)) {
    return Fail(NVFP4_EVERSION, "nvfp4_conv has %zu bytes here, the caller's has %u.", sizeof(c),
                c.struct_size);
  }
  NVFP4_TRY(CheckIoType(c.io_type));
  NVFP4_TRY(CheckFloatType("state_type", c.state_type));
  NVFP4_TRY(CheckFloatType("weight_type", c.weight_type));
  if (c.width < 2 || c.width > 4) {
    return Fail(NVFP4_ESHAPE, "width must be 2 to 4, is %d.", c.width);
  }
  NVFP4_TRY(CheckFlag("silu", c.silu));
  NVFP4_TRY(CheckBatch(c.tokens, c.sequences, c.decode_sequences));
  NVFP4_TRY(CheckEighths("channels", c.channels, kChannelsLimit));
  NVFP4_TRY(CheckVectorRows(c.io_type, {"x", c.x, c.x_stride, c.channels}));
  NVFP4_TRY(CheckVectorRows(c.io_type, {"y", c.y, c.y_stride, c.channels}));
  NVFP4_TRY(CheckAligned("weight", c.weight, TypeBytes(c.weight_type)));
  if (c.bias != nullptr) {
    NVFP4_TRY(CheckAligned("bias", c.bias, TypeBytes(c.weight_type)));
  }
  NVFP4_TRY(CheckSlots(c.query_start, c.slots, c.first_slot, c.slot_count));
  // Either order of channels and time may be the inner one; a slot is longer than both.
  NVFP4_TRY(CheckRows(c.state_type, {"state channels", c.state, c.state_channel_stride, 1}));
  NVFP4_TRY(CheckRows(c.state_type, {"state times", c.state, c.state_time_stride, 1}));
  return CheckRows(c.state_type, {"state slots", c.state, c.state_slot_stride, c.channels});
}

nvfp4_status CheckDeltaSizes(const nvfp4_delta* delta) {
  NVFP4_TRY(CheckAligned("delta", delta, alignof(nvfp4_delta)));
  const nvfp4_delta& d = *delta;
  if (d.struct_size != sizeof(d)) {
    return Fail(NVFP4_EVERSION, "nvfp4_delta has %zu bytes here, the caller's has %u.", sizeof(d),
                d.struct_size);
  }
  NVFP4_TRY(CheckIoType(d.io_type));
  NVFP4_TRY(CheckFloatType("gate_type", d.gate_type));
  NVFP4_TRY(CheckFloatType("a_log_type", d.a_log_type));
  NVFP4_TRY(CheckFloatType("dt_bias_type", d.dt_bias_type));
  NVFP4_TRY(CheckFloatType("state_type", d.state_type));
  NVFP4_TRY(CheckFlag("normalize", d.normalize));
  if (!(d.scale > 0.0F && std::isfinite(d.scale))) {
    return Fail(NVFP4_ESHAPE, "scale must be finite and above 0, is %g.",
                static_cast<double>(d.scale));
  }
  NVFP4_TRY(CheckBatch(d.tokens, d.sequences, d.decode_sequences));
  NVFP4_TRY(CheckSize("max_query_len", d.max_query_len, kSizeLimit));
  return CheckHeadCounts(d);
}

nvfp4_status CheckDelta(const nvfp4_delta& d) {
  const int64_t keys = d.k_heads * d.k_dim, values = d.v_heads * d.v_dim;
  NVFP4_TRY(CheckVectorRows(d.io_type, {"q", d.q, d.q_stride, keys}));
  NVFP4_TRY(CheckVectorRows(d.io_type, {"k", d.k, d.k_stride, keys}));
  NVFP4_TRY(CheckVectorRows(d.io_type, {"v", d.v, d.v_stride, values}));
  NVFP4_TRY(CheckVectorRows(d.io_type, {"out", d.out, d.out_stride, values}));
  NVFP4_TRY(CheckRows(d.gate_type, {"a", d.a, d.a_stride, d.v_heads}));
  NVFP4_TRY(CheckRows(d.gate_type, {"b", d.b, d.b_stride, d.v_heads}));
  NVFP4_TRY(CheckAligned("a_log", d.a_log, TypeBytes(d.a_log_type)));
  NVFP4_TRY(CheckAligned("dt_bias", d.dt_bias, TypeBytes(d.dt_bias_type)));
  NVFP4_TRY(CheckSlots(d.query_start, d.slots, d.first_slot, d.slot_count));
  return CheckVectorRows(d.state_type,
                         {"state slots", d.state, d.state_slot_stride, values * d.k_dim});
}

nvfp4_status CheckGateNorm(const nvfp4_gate_norm* norm) {
  NVFP4_TRY(CheckAligned("norm", norm, alignof(nvfp4_gate_norm)));
  const nvfp4_gate_norm& n = *norm;
  if (n.struct_size != sizeof(n)) {
    return Fail(NVFP4_EVERSION, "nvfp4_gate_norm has %zu bytes here, the caller's has %u.",
                sizeof(n), n.struct_size);
  }
  NVFP4_TRY(CheckIoType(n.io_type));
  NVFP4_TRY(CheckFloatType("weight_type", n.weight_type));
  if (n.gate != NVFP4_GATE_SILU && n.gate != NVFP4_GATE_SIGMOID) {
    return Fail(NVFP4_ETYPE, "gate must be NVFP4_GATE_SILU (1) or NVFP4_GATE_SIGMOID (2), is %d.",
                n.gate);
  }
  if (!(n.eps >= 0.0F && std::isfinite(n.eps))) {
    return Fail(NVFP4_ESHAPE, "eps must be finite and not negative, is %g.",
                static_cast<double>(n.eps));
  }
  if (n.reserved != 0) {
    return Fail(NVFP4_EVERSION, "reserved must be 0, is %d.", n.reserved);
  }
  NVFP4_TRY(CheckSize("tokens", n.tokens, kSizeLimit));
  NVFP4_TRY(CheckSize("heads", n.heads, kHeadsLimit));
  NVFP4_TRY(CheckEighths("hidden", n.hidden, kHeadDimLimit));
  const int64_t width = n.heads * n.hidden;
  NVFP4_TRY(CheckAligned("weight", n.weight, TypeBytes(n.weight_type)));
  NVFP4_TRY(CheckVectorRows(n.io_type, {"x", n.x, n.x_stride, width}));
  NVFP4_TRY(CheckVectorRows(n.io_type, {"z", n.z, n.z_stride, width}));
  return CheckVectorRows(n.io_type, {"y", n.y, n.y_stride, width});
}

}  // namespace nvfp4
