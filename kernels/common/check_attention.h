// The argument checks of attention, shared by both libraries.
#ifndef NVFP4_COMMON_CHECK_ATTENTION_H_
#define NVFP4_COMMON_CHECK_ATTENTION_H_

#include "check.h"

namespace nvfp4 {

inline constexpr int64_t kSequencesLimit = 65535;
inline constexpr int64_t kHeadsLimit = 4096;

// Everything but pointers and strides: what the workspace query reads.
nvfp4_status CheckAttentionSizes(const nvfp4_attention* attention);
// Pointers and strides, after the sizes.
nvfp4_status CheckAttention(const nvfp4_attention& attention);
nvfp4_status CheckCacheRows(const nvfp4_cache_rows* rows);

}  // namespace nvfp4

#endif  // NVFP4_COMMON_CHECK_ATTENTION_H_
