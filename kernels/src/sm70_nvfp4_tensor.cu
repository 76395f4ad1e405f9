// Instances and launch of the tensor-core GEMM.
#include "launch.h"
#include "sm70_nvfp4_tensor.cuh"

namespace nvfp4 {
namespace {

template <Mode kMode>
cudaError_t Launch(const MatmulArgs& args, const MatmulPlan& plan, bool float_scale,
                   cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(plan.row_tiles), static_cast<unsigned>(plan.column_groups),
                  static_cast<unsigned>(plan.split_k));
  if (float_scale) {
    TensorKernel<4, 2, 4, true, kMode><<<grid, 128, TensorSharedBytes<4>(), stream>>>(args);
  } else {
    TensorKernel<8, 2, 4, false, kMode><<<grid, 128, TensorSharedBytes<8>(), stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchTensor(const MatmulArgs& args, const MatmulPlan& plan, bool float_scale,
                         Mode mode, cudaStream_t stream) {
  if (mode == Mode::kDense) return Launch<Mode::kDense>(args, plan, float_scale, stream);
  if (mode == Mode::kGateUp) return Launch<Mode::kGateUp>(args, plan, float_scale, stream);
  return Launch<Mode::kDown>(args, plan, float_scale, stream);
}

}  // namespace nvfp4
