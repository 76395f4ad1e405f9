// What the ABI files of the sm_70 library share: its layout, and packed weights as the kernels see
// them.
#pragma once
#include <cuda_runtime_api.h>

#include "check.h"
#include "launch.h"
#include "status.h"

namespace nvfp4::sm70 {

inline constexpr LayoutId kLayout = {NVFP4_LAYOUT_SM70, kLayoutVersion};

inline cudaStream_t StreamOf(void* stream) { return static_cast<cudaStream_t>(stream); }
// NVFP4_OK, or NVFP4_EDEVICE with the call that failed and the run time's words.
nvfp4_status CheckCuda(cudaError_t error, const char* call);

inline bool IsGateUp(const nvfp4_weight& weight) { return weight.kind == NVFP4_GATE_UP; }
// Scales that stay FP32 words in the packed form, applied to sums; E4M3 scales become E5M3 bytes.
inline bool HasFloatScales(const nvfp4_weight& weight) { return weight.scale_type != NVFP4_E4M3; }

// FP16 activations only, of the operation that `what` names.
nvfp4_status CheckHalves(const char* what, int32_t io_type);
// The same for products; row offsets must fit the kernels' 32-bit index of 16-byte pieces.
nvfp4_status CheckActivations(int32_t io_type, int64_t rows, int64_t stride);

// Everything of a product but rows and plans.
MatmulArgs ArgsOf(const nvfp4_weight& weight);

}  // namespace nvfp4::sm70
