// Instances and launch of the skinny kernels.
#include "launch.h"
#include "sm70_nvfp4_skinny_wide.cuh"

namespace nvfp4 {
namespace {

template <typename Kernel>
cudaError_t Launch(Kernel kernel, dim3 grid, int threads, int shared_bytes, const MatmulArgs& args,
                   cudaStream_t stream) {
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  kernel<<<grid, threads, shared_bytes, stream>>>(args);
  return cudaGetLastError();
}

template <int MT, int NT, int WK, int kMinBlocks, bool kFloatScale, Mode kMode>
cudaError_t Narrow(const MatmulArgs& args, dim3 grid, cudaStream_t stream) {
  return Launch(SkinnyKernel<MT, NT, WK, kMinBlocks, kFloatScale, kMode>, grid, WK * 32,
                SkinnySharedBytes<MT, NT, WK>(), args, stream);
}

template <int MT, int NT, int WN, int WK, int kMinBlocks, bool kFloatScale, Mode kMode>
cudaError_t Wide(const MatmulArgs& args, dim3 grid, cudaStream_t stream) {
  return Launch(SkinnyWideKernel<MT, NT, WN, WK, kMinBlocks, kFloatScale, kMode>, grid,
                WN * WK * 32, WideSharedBytes<MT, NT, WN, WK>(), args, stream);
}

// 17 to 32 tokens, with the second launch that even shares need.
template <int WN, int WK, bool kFloatScale>
cudaError_t WideDense(const MatmulArgs& args, const MatmulPlan& plan, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(plan.column_groups));
  const cudaError_t error = Wide<4, 2, WN, WK, 1, kFloatScale, Mode::kDense>(args, grid, stream);
  if (error != cudaSuccess || plan.span == 0) return error;
  const dim3 blocks(static_cast<unsigned>(SpanBlocks(plan, args.n)), 4);
  FixUpKernel<4, 2, WN><<<blocks, FixUpThreads<2, WN>(), 0, stream>>>(args);
  return cudaGetLastError();
}

template <bool kFloatScale>
cudaError_t Dense(const MatmulArgs& args, const MatmulPlan& plan, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(plan.column_groups), static_cast<unsigned>(plan.split_k));
  constexpr Mode kMode = Mode::kDense;
  if (plan.m_tiles == 1) return Narrow<1, 1, 8, 2, kFloatScale, kMode>(args, grid, stream);
  if (plan.m_tiles == 2) return Narrow<2, 1, 8, 2, kFloatScale, kMode>(args, grid, stream);
  return plan.n_tiles == 4 ? WideDense<2, 4, kFloatScale>(args, plan, stream)
                           : WideDense<1, 8, kFloatScale>(args, plan, stream);
}

template <bool kFloatScale, Mode kMode>
cudaError_t Grouped(const MatmulArgs& args, const MatmulPlan& plan, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(plan.column_groups), static_cast<unsigned>(plan.row_tiles));
  if (plan.m_tiles == 1)
    return Narrow<1, 2, 4, kFloatScale ? 2 : 4, kFloatScale, kMode>(args, grid, stream);
  if (plan.m_tiles == 2) {
    return plan.warps == 8 ? Narrow<2, 2, 8, 1, kFloatScale, kMode>(args, grid, stream)
                           : Narrow<2, 2, 4, 2, kFloatScale, kMode>(args, grid, stream);
  }
  return plan.warps == 8 ? Wide<4, 2, 1, 8, 1, kFloatScale, kMode>(args, grid, stream)
                         : Wide<4, 2, 1, 4, 1, kFloatScale, kMode>(args, grid, stream);
}

}  // namespace

cudaError_t LaunchSkinny(const MatmulArgs& args, const MatmulPlan& plan, bool float_scale,
                         Mode mode, cudaStream_t stream) {
  if (mode == Mode::kDense) {
    return float_scale ? Dense<true>(args, plan, stream) : Dense<false>(args, plan, stream);
  }
  if (mode == Mode::kGateUp) {
    return float_scale ? Grouped<true, Mode::kGateUp>(args, plan, stream)
                       : Grouped<false, Mode::kGateUp>(args, plan, stream);
  }
  return float_scale ? Grouped<true, Mode::kDown>(args, plan, stream)
                     : Grouped<false, Mode::kDown>(args, plan, stream);
}

}  // namespace nvfp4
