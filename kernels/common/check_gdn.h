// The argument checks of the gated delta rule and its neighbours, shared by both libraries.
#ifndef NVFP4_COMMON_CHECK_GDN_H_
#define NVFP4_COMMON_CHECK_GDN_H_

#include "check.h"

namespace nvfp4 {

inline constexpr int64_t kChannelsLimit = INT64_C(1) << 20;
inline constexpr int64_t kGdnHeadDimLimit = 256;

nvfp4_status CheckConv(const nvfp4_conv* conv);
// Everything but pointers and strides: what the workspace query reads.
nvfp4_status CheckDeltaSizes(const nvfp4_delta* delta);
// Pointers and strides, after the sizes.
nvfp4_status CheckDelta(const nvfp4_delta& delta);
nvfp4_status CheckGateNorm(const nvfp4_gate_norm* norm);

}  // namespace nvfp4

#endif  // NVFP4_COMMON_CHECK_GDN_H_
